//! Proofs in DNS that a program of the administrator publishes.
//!
//! The program is run without a shell, as `PROGRAM add|remove RECORD VALUE`, and with the same
//! values as `GW_ACME_ACTION`, `GW_ACME_RECORD`, `GW_ACME_VALUE`, and the name as `GW_ACME_NAME`.
//! It inherits the other variables of the gateway, but for the gateway's own, which begin with
//! `GW_`. It succeeds with status 0 and when the record is published or removed, also if it was
//! before.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::dns::update::blocking;
use crate::dns::{are_visible, record_name, records};
use crate::error::AcmeError;
use crate::limits::{HOOK_OUTPUT_BYTES_MAX, HOOK_WITHIN};
use crate::proof::{ChallengeKind, Proof, Publisher};
use crate::settings::HookSettings;

/// Time between two looks at whether the program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Reads of an output between two looks: what a pipe holds.
const READS_AT_ONCE: usize = 16;
/// Time for the last output of a program that has ended.
const OUTPUT_WITHIN: Duration = Duration::from_secs(1);

/// Publishes proofs with a program.
pub struct Hook {
    settings: Arc<HookSettings>,
    limit: Duration,
}

impl Hook {
    /// A publisher with these settings.
    pub fn new(settings: HookSettings) -> Self {
        Self {
            settings: Arc::new(settings),
            limit: HOOK_WITHIN,
        }
    }

    /// As [`Self::new`], with another time limit of the program.
    pub fn with_limit(settings: HookSettings, limit: Duration) -> Self {
        Self {
            limit,
            ..Self::new(settings)
        }
    }

    async fn run(&self, action: &'static str, proofs: &[Proof]) -> Result<(), AcmeError> {
        let settings = Arc::clone(&self.settings);
        let proofs = proofs.to_vec();
        let limit = self.limit;
        blocking(move || {
            for proof in &proofs {
                let record = record_name(&settings.dns_servers, &proof.name)?.to_ascii();
                let record = record.trim_end_matches('.');
                run(&settings, action, record, proof, limit).map_err(|reason| {
                    AcmeError::proof(format!(
                        "acme.hook.program: {} {action} {record}: {reason}",
                        settings.program.display()
                    ))
                })?;
            }
            Ok(())
        })
        .await
    }
}

#[async_trait]
impl Publisher for Hook {
    fn kind(&self) -> ChallengeKind {
        ChallengeKind::Dns01
    }

    async fn publish(&self, proofs: &[Proof]) -> Result<(), AcmeError> {
        self.run("add", proofs).await
    }

    async fn is_visible(&self, proofs: &[Proof]) -> Result<bool, AcmeError> {
        let settings = Arc::clone(&self.settings);
        // The program ends when the record is published.
        if settings.dns_servers.is_empty() {
            return Ok(true);
        }
        let proofs = proofs.to_vec();
        blocking(move || {
            let records = records(&settings.dns_servers, &proofs)?;
            are_visible(&settings.dns_servers, &records)
        })
        .await
    }

    async fn withdraw(&self, proofs: &[Proof]) -> Result<(), AcmeError> {
        self.run("remove", proofs).await
    }
}

fn run(
    settings: &HookSettings,
    action: &str,
    record: &str,
    proof: &Proof,
    limit: Duration,
) -> Result<(), String> {
    let mut command = Command::new(&settings.program);
    command
        .args([action, record, &proof.value])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // The children of the program end with it.
        .process_group(0);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"GW_") {
            command.env_remove(name);
        }
    }
    command
        .env("GW_ACME_ACTION", action)
        .env("GW_ACME_NAME", &proof.name)
        .env("GW_ACME_RECORD", record)
        .env("GW_ACME_VALUE", &proof.value);
    let mut child = command.spawn().map_err(|error| {
        format!(
            "cannot be run: {error}; check that the file exists, can be executed, and names \
                 its interpreter"
        )
    })?;
    let mut outputs = [
        child.stderr.take().map(OwnedFd::from),
        child.stdout.take().map(OwnedFd::from),
    ]
    .map(Output::new);
    let status = wait(&mut child, &mut outputs, limit);
    let output = outputs
        .iter()
        .map(Output::text)
        .filter(|text| !text.is_empty())
        .collect::<Vec<_>>()
        .join("; ");
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{status}: {}", said(&output))),
        Err(reason) => Err(format!("{reason}: {}", said(&output))),
    }
}

fn said(output: &str) -> &str {
    match output.is_empty() {
        true => "it says nothing; run it by hand with these arguments",
        false => output,
    }
}

/// The status of the program, which is killed after `limit`. Reads its outputs meanwhile.
fn wait(child: &mut Child, outputs: &mut [Output], limit: Duration) -> Result<ExitStatus, String> {
    let began = Instant::now();
    let status = loop {
        outputs.iter_mut().for_each(Output::read);
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) if began.elapsed() < limit => await_output(outputs),
            Ok(None) => break kill(child, limit),
            Err(error) => break Err(error.to_string()),
        }
    };
    // A child that the program has left may hold the outputs for longer.
    let ended = Instant::now();
    while outputs.iter().any(|output| output.source.is_some()) && ended.elapsed() < OUTPUT_WITHIN {
        await_output(outputs);
        outputs.iter_mut().for_each(Output::read);
    }
    status
}

/// Waits until an output can be read, at most [`LOOK_EVERY`].
fn await_output(outputs: &[Output]) {
    let sources = outputs.iter().filter_map(|output| output.source.as_ref());
    let mut sources = sources
        .map(|source| PollFd::new(source, PollFlags::IN))
        .collect::<Vec<_>>();
    // Interrupted by a signal: the caller looks again.
    let _ = poll(&mut sources, Timespec::try_from(LOOK_EVERY).ok().as_ref());
}

/// Kills the program and its children. Returns the reason.
fn kill(child: &mut Child, limit: Duration) -> Result<ExitStatus, String> {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(group) = group {
        // The group is gone if the program ended just now.
        kill_process_group(group, Signal::KILL).ok();
    }
    Err(match child.wait() {
        Ok(_) => format!("killed because it did not end within {} s", limit.as_secs()),
        Err(error) => error.to_string(),
    })
}

/// An output of the program.
struct Output {
    /// `None` at the end of the output.
    source: Option<File>,
    kept: Vec<u8>,
}

impl Output {
    fn new(pipe: Option<OwnedFd>) -> Self {
        let pipe = pipe.filter(|pipe| ioctl_fionbio(pipe, true).is_ok());
        Self {
            source: pipe.map(File::from),
            kept: Vec::new(),
        }
    }

    /// Reads at most [`READS_AT_ONCE`] pieces, so that the time limit of the program is checked in
    /// between, and keeps the first bytes.
    fn read(&mut self) {
        let mut buffer = [0; 4096];
        for _ in 0..READS_AT_ONCE {
            let Some(source) = &mut self.source else {
                return;
            };
            match source.read(&mut buffer) {
                Ok(length @ 1..) => {
                    let room = HOOK_OUTPUT_BYTES_MAX.saturating_sub(self.kept.len());
                    self.kept.extend_from_slice(&buffer[..length.min(room)]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => self.source = None,
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).trim().to_owned()
    }
}
