//! Power cuts of the agent's machine: an enrollment is whole or can be continued, and an agent
//! starts again.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::Value;

use super::power_cuts::{is_full_run, loss_of};
use crate::support::agents::in_process;
use crate::support::lossy_disk::LossyDisk;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Running, Served, gw_agent};

/// `gw-agent enroll` with a token in a file, into a folder.
fn enroll(prepared: &Prepared, served: &Served, token: &str, state: &Path) -> Command {
    let mut command = gw_agent();
    let url = format!("https://eu1.gw.localhost:{}", served.address.port());
    command
        .args(["enroll", "--gateway", &url, "--ca-file"])
        .arg(prepared.path("data/dev-ca.crt"))
        .arg("--state-dir")
        .arg(state)
        .env("GW_ENROLLMENT_TOKEN", token)
        .stderr(Stdio::piped());
    command
}

fn assert_enrolled(folder: &Path) {
    let enrollment: Value =
        serde_json::from_slice(&fs::read(folder.join("agent.json")).unwrap()).unwrap();
    assert!(enrollment["agent_id"].is_string(), "{enrollment}");
    in_process::identity(folder);
    CertificateDer::from_pem_file(folder.join("gateway-ca.crt")).unwrap();
    assert!(!folder.join("enrollment.json").exists());
}

#[test]
fn an_enrollment_survives_a_power_cut_at_any_moment() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let api = prepared.api(served.admin_address);
    let token = || api.create_enrollment_token("demo", &["echo"]);
    let cuts = if is_full_run() { 30 } else { 6 };
    for cut in 0..cuts {
        let is_killed = cut % 3 == 2;
        let name = if is_killed { "killed" } else { "whole" };
        let state = disk.path().join(format!("{name}{}/agent", cut / 3));
        let mut command = enroll(&prepared, &served, &token(), &state);
        if cut % 3 == 1 {
            // In place of the agent before.
            command.arg("--force");
        }
        let mut process = command.spawn().unwrap();
        if is_killed {
            // At any moment of an enrollment, which takes about this long.
            thread::sleep(Duration::from_millis(cut as u64 * 37 % 300));
            drop(Running::new(process));
        } else {
            assert!(process.wait().unwrap().success());
        }
        disk.cut_power(loss_of(cut));
        if is_killed {
            // The enrollment goes on, begins again, or is complete. If the gateway has used up the
            // token, another one is needed.
            let output = command.output().unwrap();
            let message = String::from_utf8(output.stderr).unwrap();
            let is_complete = message.contains("contains an enrolled agent");
            if message.contains("refused the enrollment token") {
                command.env("GW_ENROLLMENT_TOKEN", token());
                assert!(command.status().unwrap().success());
            } else {
                assert!(is_complete || output.status.success(), "{message}");
            }
        }
        assert_enrolled(&state);
    }
}
