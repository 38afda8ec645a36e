use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use gw_shared::doctor::Verdict;

use super::*;
use crate::fake_gateway::{self, Authority, HOSTNAME, LONG_AGO, NOW, refusal};
use crate::testing::ClosedPort;

const ACCEPTED: &str = "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: gw-tunnel\r\n\r\n";

/// Checks an agent whose certificate is valid in `years` and whose gateway answers tunnel
/// requests with `tunnel`.
fn findings(
    years: std::ops::Range<i32>,
    backend: &str,
    mut tunnel: impl FnMut() -> String + Send + 'static,
) -> BTreeMap<String, (Verdict, String)> {
    let authority = Authority::new();
    let port = fake_gateway::serve(&authority, move |request| {
        if request.head.starts_with("GET /tunnel ") {
            return tunnel();
        }
        let date = httpdate::fmt_http_date(SystemTime::now() - Duration::from_secs(60));
        format!("HTTP/1.1 200 OK\r\ndate: {date}\r\ncontent-length: 2\r\n\r\n{{}}")
    });
    let (directory, _) = fake_gateway::agent(&authority, years, port);
    fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
    // The lock of a running agent, which doctor does not need.
    let _running = StateDir::new(directory.path()).lock().unwrap();
    let options = DoctorOptions {
        config: None,
        state_dir: Some(directory.path().to_owned()),
        backends: vec![backend.to_owned()],
    };
    let checks = examine(&options, |name| {
        (name == "GW_HEALTH_CHECK").then(|| "tcp".to_owned())
    });
    let found = checks.checks().iter().cloned();
    found.map(|it| (it.check, (it.verdict, it.found))).collect()
}

#[test]
fn checks_of_a_working_agent_succeed() {
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", backend.local_addr().unwrap());
    let found = findings(NOW, &url, || ACCEPTED.to_owned());
    let verdict = |check: &str| match found.get(check) {
        Some((verdict, _)) => *verdict,
        None => panic!("{check}: {found:?}"),
    };
    for check in [
        "state folder",
        "configuration",
        "certificate",
        "gateway's name",
        "gateway",
    ] {
        assert_eq!(verdict(check), Verdict::Ok, "{found:?}");
    }
    assert_eq!(verdict("clock of the gateway"), Verdict::Warning);
    assert_eq!(
        found[&format!("tunnel of {HOSTNAME}")],
        (Verdict::Ok, "the gateway accepts it".to_owned())
    );
    for check in ["backend of", "health check of"] {
        assert_eq!(verdict(&format!("{check} {HOSTNAME}")), Verdict::Ok);
    }
}

#[test]
fn failures_are_found_for_certificate_tunnel_and_backend() {
    let closed = ClosedPort::new();
    let found = findings(LONG_AGO, &format!("http://{}", closed.address), || {
        refusal(403, "", "GW_AGENT_NOT_ALLOWED")
    });
    let (verdict, error) = &found[&format!("tunnel of {HOSTNAME}")];
    assert!(
        *verdict == Verdict::Failed && error.contains("GW_AGENT_NOT_ALLOWED"),
        "{error}"
    );
    assert_eq!(found["certificate"].0, Verdict::Failed);
    for check in ["backend of", "health check of"] {
        assert_eq!(found[&format!("{check} {HOSTNAME}")].0, Verdict::Failed);
    }
}

#[test]
fn machine_without_an_agent_is_advised_to_enroll() {
    let directory = tempfile::tempdir().unwrap();
    let options = DoctorOptions {
        state_dir: Some(directory.path().to_owned()),
        ..DoctorOptions::default()
    };
    let found = examine(&options, |_| None);
    let last = found.checks().last().unwrap();
    assert_eq!(
        (last.check.as_str(), last.verdict),
        ("enrollment", Verdict::Failed)
    );
    assert!(last.found.contains("gw-agent enroll"), "{}", last.found);
    let advice = last.advice.as_ref().unwrap();
    assert!(advice.contains("enrollment-token create"), "{advice}");
}

#[test]
fn a_state_folder_of_another_user_is_warned_of() {
    let directory = tempfile::tempdir().unwrap();
    let warnings = || {
        let mut out = Examination::default();
        owner(&mut out, directory.path());
        out.checks()
            .iter()
            .map(|check| (check.verdict, check.found.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(warnings(), []);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(directory.path(), Some(65534), None).unwrap();
        assert!(
            matches!(&warnings()[..], [(Verdict::Warning, found)] if found.contains("user \
                65534"))
        );
    }
}

#[test]
fn clock_differences_are_found_in_both_directions() {
    let now = SystemTime::now();
    for (gateway, verdict) in [
        (Some(now), Verdict::Ok),
        (Some(now + Duration::from_secs(40)), Verdict::Warning),
        (Some(now - Duration::from_secs(400)), Verdict::Failed),
        (None, Verdict::Warning),
    ] {
        let mut out = Examination::default();
        clock_offset(&mut out, gateway, now);
        assert_eq!(out.checks()[0].verdict, verdict, "{gateway:?}");
    }
}

#[test]
fn certificate_verdict_depends_on_whether_run_can_replace_it() {
    let authority = Authority::new();
    let identity = Identity::from_pem(authority.identity_pem(LONG_AGO).as_bytes()).unwrap();
    let end = identity.validity().unwrap().not_after;
    for (now, verdict) in [
        (end - Duration::from_secs(60), Verdict::Ok),
        (end + Duration::from_secs(60), Verdict::Warning),
        (end + RECOVERY, Verdict::Failed),
        (SystemTime::UNIX_EPOCH, Verdict::Warning),
    ] {
        let mut out = Examination::default();
        certificate(&mut out, &identity, now);
        assert_eq!(out.checks()[0].verdict, verdict, "{now:?}");
    }
}
