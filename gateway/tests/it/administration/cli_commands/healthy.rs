//! `gw-gateway healthy`: its exit code, and the reason in one line.

use std::io::Read;
use std::process::Stdio;

use crate::support::peers::backend;
use crate::support::processes::process::{Running, gw_gateway, hold};

#[test]
fn a_gateway_that_does_not_take_requests_has_a_reason_in_one_line() {
    let reason = |options: &[&str]| {
        let output = gw_gateway().arg("healthy").args(options).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), output.stdout.as_slice()),
            (Some(1), &b""[..]),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    };
    let (_held, closed) = backend::refusing();
    let said = reason(&["--admin-url", &format!("http://{closed}")]);
    let expected = format!("gw-gateway: http://{closed}: connection refused: no gateway listens");
    assert!(said.starts_with(&expected), "{said}");
    let said = reason(&[
        "--admin-url",
        &format!("http://{closed}"),
        "--wait",
        "300ms",
    ]);
    assert!(said.ends_with(" (after 300ms)\n"), "{said}");

    let draining = backend::answering("HTTP/1.1 503 X\r\nContent-Length: 9\r\n\r\ndraining\n");
    let said = reason(&["--admin-url", &draining]);
    assert_eq!(
        said,
        format!("gw-gateway: {draining}: not ready: draining\n")
    );

    let other = backend::answering("HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n");
    let said = reason(&["--admin-url", &other]);
    assert!(
        said.contains("is not the admin listener of a gateway") && said.contains("404"),
        "{said}"
    );
}

#[test]
fn a_wait_ends_when_the_gateway_that_init_sets_up_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("gateway.toml");
    let reserved = hold("127.0.0.1:0".parse().unwrap());
    let admin = reserved.local_addr().unwrap().as_socket().unwrap();

    // Without a wait, a missing configuration is an error at once.
    let mut healthy = gw_gateway();
    healthy.arg("healthy").arg("--config").arg(&config);
    let output = healthy.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");

    healthy.args(["--wait", "2m"]).stdout(Stdio::piped());
    let mut waiting = healthy.spawn().unwrap();
    let mut stdout = waiting.stdout.take().unwrap();
    let mut waiting = Running::new(waiting);
    let mut init = gw_gateway();
    init.args(["init", "--account", "acme", "--serve"])
        .args(["--listen", "127.0.0.1:0", "--admin-listen"])
        .arg(admin.to_string())
        .arg("--config")
        .arg(&config)
        .arg("--data-dir")
        .arg(folder.path().join("data"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let _gateway = Running::new(init.spawn().unwrap());
    assert_eq!(waiting.exit_code(), Some(0));
    let mut said = String::new();
    stdout.read_to_string(&mut said).unwrap();
    assert_eq!(said, format!("http://{admin}: ready\n"));
}
