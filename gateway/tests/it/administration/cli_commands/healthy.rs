//! `gw-gateway healthy`: its exit code, and the reason in one line.

use std::io::Read;
use std::process::Stdio;

use crate::administration::{Ended, end};
use crate::support::peers::backend;
use crate::support::processes::process::{Running, gw_gateway, hold};

#[test]
fn a_gateway_that_does_not_take_requests_has_a_reason_in_one_line() {
    let (_held, closed) = backend::refusing();
    let closed = format!("http://{closed}");
    let draining = backend::answering("HTTP/1.1 503 X\r\nContent-Length: 9\r\n\r\ndraining\n");
    let other = backend::answering("HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n");
    let not_found = " is not the admin listener of a gateway: it answers /readyz with 404";
    for (url, wait, start, last) in [
        (
            &closed,
            None,
            ": connection refused: no gateway listens",
            "",
        ),
        (
            &closed,
            Some("300ms"),
            ": connection refused",
            " (after 300ms)\n",
        ),
        (&draining, None, ": not ready: draining\n", ""),
        (&other, None, not_found, ""),
    ] {
        let mut healthy = gw_gateway();
        healthy.args(["healthy", "--admin-url", url]);
        if let Some(wait) = wait {
            healthy.args(["--wait", wait]);
        }
        let Ended { code, out, err } = end(&mut healthy);
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        assert!(
            err.starts_with(&format!("gw-gateway: {url}{start}")),
            "{err}"
        );
        assert!(err.ends_with(last), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    }
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
    end(&mut healthy).assert_failed(2, &[]);

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
