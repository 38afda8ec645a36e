//! Setups: paths from callers to a backend, through the product or a peer.

use clap::ValueEnum;

use super::peers;
use super::{Bench, LOAD_CORE, MEASURED_CORE};
use crate::client::Target;
use crate::demo::{Demo, Options as DemoOptions};
use crate::failure::{Failure, ensure};
use crate::machine::process::Process;
use crate::machine::procfs::{self, Cpu};

/// Enough slots that the agent never refuses; the peers have no such limit.
const SLOTS: u32 = 1024;

/// What callers reach the backend through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// The product, with a service key.
    Gw,
    /// The product, with an access token.
    GwJwt,
    /// The product, before a backend that speaks HTTP/2.
    GwH2c,
    /// The product, before a backend on a Unix socket.
    GwUnix,
    Haproxy,
    Nginx,
    Rathole,
    RatholeNoise,
    /// Two hops that pass bytes on, with the product's reactor and sockets.
    Null,
    /// The same, with TLS on both hops.
    NullTls,
    /// The backend alone: what load and backend contribute to a latency.
    Direct,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gw => "gw",
            Self::GwJwt => "gw, JWT",
            Self::GwH2c => "gw, h2c backend",
            Self::GwUnix => "gw, Unix backend",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Rathole => "rathole",
            Self::RatholeNoise => "rathole, Noise",
            Self::Null => "null relay",
            Self::NullTls => "null relay, TLS",
            Self::Direct => "no relay",
        }
    }

    /// Setups of two hops that relay HTTP/1.1 of each caller on a connection of its own.
    pub(super) const HTTP1: [Self; 7] = [
        Self::Gw,
        Self::Haproxy,
        Self::Nginx,
        Self::Rathole,
        Self::RatholeNoise,
        Self::Null,
        Self::NullTls,
    ];

    /// The relays whose figures are a floor for those of the others.
    pub(super) const FLOORS: [Self; 2] = [Self::Null, Self::NullTls];

    pub(super) fn is_rathole(self) -> bool {
        matches!(self, Self::Rathole | Self::RatholeNoise)
    }
}

/// A kind that takes part, and the number of its program if there are several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entrant {
    pub(super) kind: Kind,
    pub(super) number: usize,
}

/// A running setup.
pub(super) struct Setup {
    pub(super) name: String,
    pub(super) target: Target,
    /// Processes whose CPU time and memory are counted.
    processes: Vec<Process>,
}

impl Setup {
    /// Starts a setup in front of the backend on `port`, and checks that it gives the backend's
    /// response.
    pub(super) fn start(bench: &Bench<'_>, entrant: Entrant, port: u16) -> Result<Self, Failure> {
        let setup = Self::start_unchecked(bench, entrant, port)?;
        setup.check()?;
        Ok(setup)
    }

    /// Starts a setup in front of a backend that HTTP/1.1 does not reach.
    pub(super) fn start_unchecked(
        bench: &Bench<'_>,
        entrant: Entrant,
        port: u16,
    ) -> Result<Self, Failure> {
        let Bench { gateway, site, .. } = bench;
        let before = |backend| {
            let (process, target) = Demo::start(gateway, &product_before(backend))?.into_parts();
            Ok::<_, Failure>((vec![process], target))
        };
        let (processes, target) = match entrant.kind {
            Kind::Gw => before(http(port))?,
            Kind::GwH2c => before(site.h2c_url())?,
            Kind::GwUnix => before(site.unix_url())?,
            Kind::GwJwt => {
                let demo = Demo::start(gateway, &product(port))?;
                let target = demo.target_with_token()?;
                (vec![demo.into_parts().0], target)
            }
            Kind::Haproxy | Kind::Nginx | Kind::Rathole | Kind::RatholeNoise => {
                site.start_peer(entrant, port)?
            }
            Kind::Null => site.start_null_relay(false, port)?,
            Kind::NullTls => site.start_null_relay(true, port)?,
            Kind::Direct => (Vec::new(), site.plain(port)?),
        };
        Ok(Self {
            name: bench.name_of(entrant),
            target,
            processes,
        })
    }

    /// A running demo under another name, with requests for its first service.
    pub(super) fn of_demo(name: &str, demo: Demo) -> Self {
        let (process, target) = demo.into_parts();
        Self {
            name: name.to_owned(),
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

    /// Runs `load` and returns its result with the CPU time that the setup spent on it, if it has
    /// processes.
    pub(super) fn spend<T>(
        &self,
        load: impl FnOnce(&Target) -> Result<T, Failure>,
    ) -> Result<(T, Option<Cpu>), Failure> {
        let before = self.cpu();
        let result = load(&self.target).map_err(|failure| Failure::during(&self.name, failure))?;
        Ok((
            result,
            (!self.processes.is_empty()).then(|| self.cpu().since(before)),
        ))
    }

    /// All processes, with their children.
    pub(super) fn pids(&self) -> Vec<u32> {
        let trees = self.processes.iter().map(|it| procfs::tree(it.pid()));
        trees.flatten().collect()
    }

    /// Times that threads of the setup have waited so far.
    pub(super) fn sleeps(&self) -> Result<u64, Failure> {
        self.pids().into_iter().map(procfs::sleeps).sum()
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
    product_before(http(backend_port))
}

fn http(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

fn product_before(backend: String) -> DemoOptions {
    DemoOptions {
        workers: 1,
        backend: Some(backend),
        cores: vec![MEASURED_CORE],
        slots: Some(SLOTS),
        ..DemoOptions::default()
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
