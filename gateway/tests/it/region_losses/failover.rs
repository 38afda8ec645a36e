//! A region with one active node behind HAProxy, as docs/region.md sets it up.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::agents::in_process;
use crate::support::gateway::Gateway;
use crate::support::peers::caller::HOST;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::process;
use crate::support::processes::process::{Running, Served, hold};
use crate::support::{eventually, programs};

/// Starts a node in its own process. `port` is 0 for a free one.
fn serve(postgres: &Postgres, folder: &Path, name: &str, port: u16) -> Served {
    let config = postgres.config_at(&folder.join(name), port);
    let path = folder.join(format!("{name}.toml"));
    let proxy = "[[trusted_proxies]]\naddress = \"127.0.0.1\"\nproxy_protocol = \"required\"\n";
    fs::write(&path, format!("{config}{proxy}")).unwrap();
    process::serve(&mut process::serve_command(&path))
}

/// Starts HAProxy in front of both nodes. The first is active; the second is used while the first
/// is down.
fn balancer(folder: &Path, port: u16, active: SocketAddr, standby: SocketAddr) -> Running {
    let config = format!(
        "defaults\n    mode tcp\n    timeout connect 1s\n    timeout client 1m\n    timeout server \
         1m\n    timeout tunnel 1h\n\
         frontend gw\n    bind 127.0.0.1:{port}\n    default_backend gw\n\
         backend gw\n    default-server check inter 100ms fall 2 rise 2 send-proxy-v2 \
         on-marked-down shutdown-sessions\n\
         \x20   server gw1 {active} on-marked-up shutdown-backup-sessions\n\
         \x20   server gw2 {standby} backup\n"
    );
    let path = folder.join("haproxy.cfg");
    fs::write(&path, config).unwrap();
    let mut command = Command::new("haproxy");
    command
        .arg("-db")
        .arg("-f")
        .arg(path)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Running::new(command.spawn().unwrap())
}

/// A metric without labels of a node.
fn metric(node: &Served, name: &str) -> f64 {
    node.metrics().sum(name)
}

/// Waits until a request through the balancer is relayed. Requests fail while a node is lost.
fn wait_until_relayed(port: u16, ca: &Path, key: &str) {
    eventually("a request is relayed", || {
        let mut curl = Command::new("curl");
        curl.args(["-s", "-o", "/dev/null", "-w", "%{http_code}"])
            .args(["--max-time", "10", "--cacert"])
            .arg(ca)
            .args(["-H", &format!("X-Gw-Service-Key: {key}")])
            .arg(format!("https://{HOST}:{port}/"));
        (curl.output().unwrap().stdout == b"200").then_some(())
    });
}

#[test]
fn another_node_takes_over_and_the_first_comes_back() {
    if !programs::usable(&["curl", "haproxy"]) {
        return;
    }
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let backend = HeldBackend::start();
    let first = serve(&postgres, folder.path(), "a", 0);
    let second = serve(&postgres, folder.path(), "b", 0);
    let first_address = first.address;
    let reserved = hold("127.0.0.1:0".parse().unwrap());
    let port = reserved.local_addr().unwrap().as_socket().unwrap().port();
    let _balancer = balancer(folder.path(), port, first_address, second.address);
    eventually("the balancer listens", || {
        TcpStream::connect(("127.0.0.1", port)).ok()
    });

    // The service, a key, and an agent that connects through the balancer.
    let ca = folder.path().join("a/dev-ca.crt");
    let state = folder.path().join("agent");
    let gateway = Gateway::start(&postgres.config(&folder.path().join("setup")));
    let api = gateway.api();
    api.create_service("demo", "echo");
    let (_, key) = api.create_service_key("demo", &["echo"]);
    let token = api.create_enrollment_token("demo", &["echo"]);
    let revision = gateway.metrics().sum("gw_store_revision");
    eventually("the nodes have followed", || {
        let known = [&first, &second].map(|node| metric(node, "gw_store_revision"));
        known.iter().all(|it| *it >= revision).then_some(())
    });
    let url = format!("https://eu1.gw.localhost:{port}");
    in_process::enroll_with(token, &url, &ca, &state);
    gateway.drain();
    let mut agent = process::gw_agent();
    agent.args(["run", "--backend", &backend.url]);
    agent.arg("--state-dir").arg(state);
    let _agent = Running::new(agent.stderr(Stdio::null()).spawn().unwrap());
    wait_until_relayed(port, &ca, &key);
    assert_eq!(metric(&first, "gw_tunnels"), 1.0);

    let held = hold(first_address);
    first.process.signal("KILL");
    drop(first);
    wait_until_relayed(port, &ca, &key);
    assert_eq!(metric(&second, "gw_tunnels"), 1.0);

    let first = serve(&postgres, folder.path(), "a", first_address.port());
    drop(held);
    eventually("the agent is back at the first node", || {
        (metric(&first, "gw_tunnels") == 1.0).then_some(())
    });
    wait_until_relayed(port, &ca, &key);
}
