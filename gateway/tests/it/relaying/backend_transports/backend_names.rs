//! Names of backends, whose addresses change.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use gw_bed::threads::{Peer, listen};

use crate::relaying::response_with;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::Running;
use crate::support::programs;

/// Time within which requests go to the next address: thirty seconds on a quiet machine.
const WITHIN: Duration = Duration::from_secs(120);

/// Runs a program in a namespace in which the first argument is the file `/etc/hosts`.
const WITH_HOSTS: &str = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";

#[test]
fn requests_follow_the_name_of_their_backend_to_another_address() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let first = TcpListener::bind("127.0.0.2:0").unwrap();
    let port = first.local_addr().unwrap().port();
    let next = TcpListener::bind(("127.0.0.3", port)).unwrap();
    for (listener, body) in [(first, "first"), (next, "next")] {
        listen(listener, move |stream| {
            let mut peer = Peer::new(stream);
            while peer.request().is_ok() {
                peer.send(response_with(body));
            }
        });
    }
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&prepared.config());
    let hosts = prepared.path("hosts");
    let name = |address: &str| fs::write(&hosts, format!("{address} backend.test\n")).unwrap();
    name("127.0.0.2");
    let url = format!("http://backend.test:{port}");
    let agent = prepared.agent_command("agent", gateway.address.port(), &url);
    let mut command = Command::new("unshare");
    command.args([
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        WITH_HOSTS,
    ]);
    command.arg(&hosts).arg(agent.get_program());
    command.args(agent.get_args()).stderr(Stdio::null());
    let _agent = Running::new(command.spawn().unwrap());
    prepared.wait_for_tunnel(gateway.address);

    // The connection to the backend is never idle, so that it does not end for that.
    let mut caller = prepared.connect(gateway.address);
    let mut ask = || String::from_utf8(caller.ask(prepared.get("/")).body).unwrap();
    assert_eq!(ask(), "first");
    name("127.0.0.3");
    let began = Instant::now();
    while ask() == "first" {
        assert!(
            began.elapsed() < WITHIN,
            "requests go to the earlier address"
        );
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(ask(), "next");
}
