use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, SystemTime};

use gw_shared::runtime;

use super::*;
use crate::backend::{Backends, Pool};
use crate::fake_gateway::{self, Authority, HOSTNAME, LONG_AGO, NOW};
use crate::testing::block_on;

/// Runs `request` on another thread while an agent without a tunnel serves its admin endpoints.
fn with_agent<T: Send + 'static>(
    prepare: impl FnOnce(&AgentContext),
    request: impl FnOnce(SocketAddr) -> T + Send + 'static,
) -> T {
    let (_directory, agent) = fake_gateway::agent(&Authority::new(), NOW, 0);
    prepare(&agent);
    block_on(async move {
        let listener = AdminListener::bind("127.0.0.1:0".parse().unwrap());
        let address = listener.address().unwrap();
        runtime::spawn(serve(Rc::new(agent), listener));
        let client = thread::spawn(move || request(address));
        while !client.is_finished() {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        client.join().unwrap()
    })
}

/// Sends `request` and returns the whole response.
fn exchange(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let time_limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(time_limit).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Asserts the status of each answer, and its end.
fn assert_answers(requests: &'static [(&str, u16, &str)]) {
    let answers = with_agent(
        |_| {},
        |address| {
            let answers = requests
                .iter()
                .map(|(request, ..)| exchange(address, request));
            answers.collect::<Vec<_>>()
        },
    );
    for ((request, status, end), answer) in requests.iter().zip(answers) {
        let is_expected =
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.ends_with(end);
        assert!(is_expected, "{request:?}: {answer}");
    }
}

#[test]
fn agent_without_a_tunnel_is_healthy_and_not_ready() {
    assert_answers(&[
        (
            "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
            200,
            "\r\n\r\nok\n",
        ),
        (
            "GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n",
            503,
            "no tunnel: acme--api.eu1.gw.localhost (it has no backend)\n",
        ),
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404, ""),
    ]);
}

#[test]
fn only_get_and_head_are_allowed() {
    assert_answers(&[
        ("HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200, "\r\n\r\n"),
        (
            "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
            405,
            "",
        ),
        ("nonsense\r\n\r\n", 400, ""),
    ]);
}

#[test]
fn metrics_contain_the_counters() {
    let prepare = |agent: &AgentContext| {
        let urls = ["http://127.0.0.1:1".to_owned()];
        let backends = Backends::from_urls("test", &urls, &mut Vec::new()).unwrap();
        let pool = Rc::new(Pool::new(HOSTNAME, &backends, 1));
        let service = agent.registry.add(HOSTNAME, &pool);
        service.failed();
        service.counts.arrived();
        service.counts.failed("GW_BACKEND_RESET");
        service.counts.received(7);
        service.counts.responded(Duration::from_millis(3));
        let expiry = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        agent.certificates.expiry.set(Some(expiry));
    };
    let text = with_agent(prepare, |address| {
        exchange(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    });
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
    let (_directory, agent) = fake_gateway::agent(&Authority::new(), LONG_AGO, 0);
    let identity = agent.config.state.identity().unwrap();
    let expiry = identity.validity().unwrap().not_after;
    agent.certificates.expiry.set(Some(expiry));
    let unready = |now| page::readiness(&agent, now).unwrap_err();
    assert!(unready(expiry).contains("expired"));
    assert!(unready(expiry - Duration::from_secs(1)).contains("no tunnel"));
    agent.registry.stopping.set(true);
    assert_eq!(unready(expiry), "stopping");
}

#[test]
fn listener_can_be_created_for_an_address_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listener = AdminListener::bind(taken.local_addr().unwrap());
    assert_eq!(listener.address(), None);
}
