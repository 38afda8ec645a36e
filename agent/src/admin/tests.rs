use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, SystemTime};

use gw_shared::runtime::{self, Driver};

use super::*;
use crate::backend::{Backends, Pool};
use crate::fake_gateway::{self, Authority, HOSTNAME, LONG_AGO, NOW};

/// Runs `request` on another thread while an agent without a tunnel serves its admin endpoints.
fn with_agent<T: Send + 'static>(
    prepare: impl FnOnce(&AgentContext),
    request: impl FnOnce(SocketAddr) -> T + Send + 'static,
) -> T {
    let authority = Authority::new();
    let directory = tempfile::tempdir().unwrap();
    let agent = Rc::new(fake_gateway::agent(
        directory.path(),
        &authority,
        &authority.identity_pem(NOW),
        0,
    ));
    prepare(&agent);
    let run = async move {
        let listener = AdminListener::bind("127.0.0.1:0".parse().unwrap());
        let address = listener.address().unwrap();
        runtime::spawn(serve(agent, listener));
        let client = thread::spawn(move || request(address));
        while !client.is_finished() {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        client.join().unwrap()
    };
    Driver::choose().unwrap().block_on(run).unwrap()
}

/// Sends `request` and returns the whole response.
fn exchange(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(address: SocketAddr, path: &str) -> String {
    exchange(address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n"))
}

#[test]
fn agent_without_a_tunnel_is_healthy_and_not_ready() {
    let answers = with_agent(
        |_| {},
        |address| ["/healthz", "/readyz", "/"].map(|path| get(address, path)),
    );
    assert!(
        answers[0].starts_with("HTTP/1.1 200 ") && answers[0].ends_with("\r\n\r\nok\n"),
        "{}",
        answers[0]
    );
    assert!(answers[1].starts_with("HTTP/1.1 503 "), "{}", answers[1]);
    assert!(
        answers[1].ends_with(&format!("no tunnel: {HOSTNAME} (it has no backend)\n")),
        "{}",
        answers[1]
    );
    assert!(answers[2].starts_with("HTTP/1.1 404 "), "{}", answers[2]);
}

#[test]
fn only_get_and_head_are_allowed() {
    let answers = with_agent(
        |_| {},
        |address| {
            let head = exchange(address, "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
            let post = exchange(
                address,
                "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
            );
            [head, post, exchange(address, "nonsense\r\n\r\n")]
        },
    );
    assert!(
        answers[0].starts_with("HTTP/1.1 200 ") && answers[0].ends_with("\r\n\r\n"),
        "{}",
        answers[0]
    );
    assert!(answers[1].starts_with("HTTP/1.1 405 "), "{}", answers[1]);
    assert!(answers[2].starts_with("HTTP/1.1 400 "), "{}", answers[2]);
}

#[test]
fn metrics_contain_the_counters() {
    let prepare = |agent: &AgentContext| {
        let backends =
            Backends::from_urls("test", &["http://127.0.0.1:1".to_owned()], &mut Vec::new())
                .unwrap();
        let service = agent
            .registry
            .add(HOSTNAME, &Rc::new(Pool::new(HOSTNAME, &backends, 1)));
        service.failed();
        service.counts.arrived();
        service.counts.failed("GW_BACKEND_RESET");
        service.counts.received(7);
        service.counts.responded(Duration::from_millis(3));
        agent.certificates.expiry.set(Some(
            SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000),
        ));
    };
    let text = with_agent(prepare, |address| get(address, "/metrics"));
    for line in [
        "gw_agent_tunnel_up{service=\"acme--api.eu1.gw.localhost\"} 0",
        "gw_agent_tunnel_failures_total{service=\"acme--api.eu1.gw.localhost\"} 1",
        "gw_agent_requests_total{service=\"acme--api.eu1.gw.localhost\"} 1",
        "gw_agent_request_failures_total{service=\"acme--api.eu1.gw.localhost\",\
         code=\"GW_BACKEND_RESET\"} 1",
        "gw_agent_response_bytes_total{service=\"acme--api.eu1.gw.localhost\"} 7",
        "gw_agent_backend_first_byte_seconds_bucket{service=\"acme--api.eu1.gw.localhost\",\
         le=\"0.005\"} 1",
        "gw_agent_backend_up{service=\"acme--api.eu1.gw.localhost\",\
         backend=\"http://127.0.0.1:1\"} 1",
        "gw_agent_certificate_expiry_timestamp_seconds 1800000000",
        "gw_agent_certificate_renewals_total{result=\"failed\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[test]
fn agent_with_an_expired_certificate_or_stopping_is_not_ready() {
    let authority = Authority::new();
    let directory = tempfile::tempdir().unwrap();
    let agent = fake_gateway::agent(
        directory.path(),
        &authority,
        &authority.identity_pem(LONG_AGO),
        0,
    );
    let expiry = agent
        .config
        .state
        .identity()
        .unwrap()
        .validity()
        .unwrap()
        .not_after;
    agent.certificates.expiry.set(Some(expiry));
    assert!(
        page::readiness(&agent, expiry)
            .unwrap_err()
            .contains("expired")
    );
    assert!(
        page::readiness(&agent, expiry - Duration::from_secs(1))
            .unwrap_err()
            .contains("no tunnel")
    );
    agent.registry.stopping.set(true);
    assert_eq!(page::readiness(&agent, expiry), Err("stopping".to_owned()));
}

#[test]
fn listener_can_be_created_for_an_address_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listener = AdminListener::bind(taken.local_addr().unwrap());
    assert_eq!(listener.address(), None);
}
