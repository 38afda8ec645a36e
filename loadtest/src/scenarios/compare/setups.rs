//! Setups: paths from callers to a backend, through the product or a peer.

use std::path::Path;

use clap::ValueEnum;

use super::peers::{self, Peer, Site};
use super::{LOAD_CORE, MEASURED_CORE};
use crate::client::Target;
use crate::demo::{Demo, Options as DemoOptions, UNLIMITED};
use crate::failure::{Failure, ensure};
use crate::machine::process::Process;
use crate::machine::procfs::Cpu;

/// Enough slots that the agent never refuses; the peers have no such limit.
const SLOTS: u32 = 1024;

/// What callers reach the backend through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// The product, with a service key.
    Gw,
    /// The product, with an access token.
    GwJwt,
    Haproxy,
    Nginx,
    Rathole,
    RatholeNoise,
    /// The backend alone: what load and backend contribute to a latency.
    Direct,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gw => "gw",
            Self::GwJwt => "gw, JWT",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Rathole => "rathole",
            Self::RatholeNoise => "rathole, Noise",
            Self::Direct => "no relay",
        }
    }

    pub(super) fn is_rathole(self) -> bool {
        matches!(self, Self::Rathole | Self::RatholeNoise)
    }
}

/// A running setup.
pub(super) struct Setup {
    pub(super) name: &'static str,
    pub(super) target: Target,
    /// Processes whose CPU time and memory are counted.
    processes: Vec<Process>,
}

impl Setup {
    /// Starts a setup in front of the backend on `port`, and checks that it gives the backend's response.
    pub(super) fn start(
        kind: Kind,
        gateway: &Path,
        site: &Site,
        port: u16,
    ) -> Result<Self, Failure> {
        let peer = |peer| site.start_peer(peer, port);
        let (processes, target) = match kind {
            Kind::Gw => {
                let (process, target) = Demo::start(gateway, &product(port))?.into_parts();
                (vec![process], target)
            }
            Kind::GwJwt => {
                let demo = Demo::start(gateway, &product(port))?;
                let target = demo.target_with_token()?;
                (vec![demo.into_parts().0], target)
            }
            Kind::Haproxy => peer(Peer::Haproxy)?,
            Kind::Nginx => peer(Peer::Nginx)?,
            Kind::Rathole => peer(Peer::Rathole { noise: false })?,
            Kind::RatholeNoise => peer(Peer::Rathole { noise: true })?,
            Kind::Direct => (Vec::new(), site.plain(port)?),
        };
        let setup = Self {
            name: kind.name(),
            target,
            processes,
        };
        setup.check()?;
        Ok(setup)
    }

    /// A running demo under another name, with requests for its first service.
    pub(super) fn of_demo(name: &'static str, demo: Demo) -> Self {
        let (process, target) = demo.into_parts();
        Self {
            name,
            target,
            processes: vec![process],
        }
    }

    fn check(&self) -> Result<(), Failure> {
        let answer = self.target.connect()?.ask("/")?;
        let good = answer.head.status == 200 && answer.body == peers::ANSWER.as_bytes();
        ensure(good, || {
            format!(
                "{}: status {}, {} bytes",
                self.name,
                answer.head.status,
                answer.body.len()
            )
        })
    }

    /// Runs `load` and returns its result with the CPU time that the setup spent on it, if it has processes.
    pub(super) fn spend<T>(
        &self,
        load: impl FnOnce(&Target) -> Result<T, Failure>,
    ) -> Result<(T, Option<Cpu>), Failure> {
        let before = self.cpu();
        let result = load(&self.target).map_err(|failure| Failure::during(self.name, failure))?;
        Ok((
            result,
            (!self.processes.is_empty()).then(|| self.cpu().since(before)),
        ))
    }

    /// Proportional set size of all processes, in bytes.
    pub(super) fn memory(&self) -> Result<u64, Failure> {
        self.processes
            .iter()
            .map(Process::proportional_memory)
            .sum()
    }

    fn cpu(&self) -> Cpu {
        self.processes.iter().map(Process::cpu).sum()
    }
}

/// The product on the measured core, with one worker.
pub(super) fn product(backend_port: u16) -> DemoOptions {
    DemoOptions {
        workers: 1,
        rate: Some(UNLIMITED),
        backend: Some(format!("http://127.0.0.1:{backend_port}")),
        cores: vec![MEASURED_CORE],
        slots: Some(SLOTS),
    }
}

/// The product with several workers on both cores, which it shares with load and backend.
pub(super) fn product_with_workers(backend_port: u16, workers: usize) -> DemoOptions {
    DemoOptions {
        workers,
        cores: vec![MEASURED_CORE, LOAD_CORE],
        ..product(backend_port)
    }
}
