//! Proofs in DNS that a program of the administrator publishes.
//!
//! The program is run without a shell, as `PROGRAM add|remove RECORD VALUE`, and with the same values as
//! `GW_ACME_ACTION`, `GW_ACME_RECORD`, `GW_ACME_VALUE`, and the name as `GW_ACME_NAME`. It inherits the other variables of the
//! gateway, but for the gateway's own, which begin with `GW_`. It succeeds with status 0 and when the record is published or
//! removed, also if it was before.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::dns::update::blocking;
use crate::dns::{are_visible, record_name, records};
use crate::error::AcmeError;
use crate::limits::{HOOK_OUTPUT_BYTES_MAX, HOOK_WITHIN};
use crate::proof::{ChallengeKind, Proof, Publisher};
use crate::settings::HookSettings;

/// Time between two looks at whether the program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
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
        format!("cannot be run: {error}; check that the file exists, can be executed, and names its interpreter")
    })?;
    let stdout = child.stdout.take().map(collect);
    let stderr = child.stderr.take().map(collect);
    let status = wait(&mut child, limit);
    let output = [stderr, stdout]
        .into_iter()
        .flatten()
        .filter_map(|output| output.recv_timeout(OUTPUT_WITHIN).ok())
        .map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned())
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

/// The status of the program, which is killed after `limit`.
fn wait(child: &mut Child, limit: Duration) -> Result<ExitStatus, String> {
    let began = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if began.elapsed() < limit => thread::sleep(LOOK_EVERY),
            Ok(None) => break,
            Err(error) => return Err(error.to_string()),
        }
    }
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(group) = group {
        // The group is gone if the program ended just now.
        kill_process_group(group, Signal::KILL).ok();
    }
    let killed = child.wait();
    Err(match killed {
        Ok(_) => format!("killed because it did not end within {} s", limit.as_secs()),
        Err(error) => error.to_string(),
    })
}

/// The first bytes of an output. Reads all of it, so that the program is not held up.
fn collect(mut output: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::spawn(move || {
        let mut kept = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = output.read(&mut buffer) {
            let room = HOOK_OUTPUT_BYTES_MAX.saturating_sub(kept.len());
            kept.extend_from_slice(&buffer[..length.min(room)]);
        }
        // The receiver is gone if a child of the program still holds the output.
        sender.send(kept).ok();
    });
    receiver
}
