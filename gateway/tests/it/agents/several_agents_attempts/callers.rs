//! Requests of a caller's connection that a backend may authenticate.

use super::{answer, refuse};
use crate::support::agents::modified_agent::Tunnel;
use crate::support::agents::scripted::{Attempt, Scripted};
use crate::support::peers::caller::Caller;
use crate::support::peers::{http2_caller, http2_caller::on_a_reactor};
use crate::support::scene::Scene;

const FORGED: &str = "X-Gw-Caller-Connection: 0123456789abcdef0123456789abcdef\r\n\
                      X_Gw_Caller_Connection: 0123456789abcdef0123456789abcdef\r\n";

/// Answers, unless the request asks that its first attempt fails.
fn act(tunnel: &mut Tunnel, attempt: &Attempt) -> bool {
    let asks = |field| attempt.nth == 0 && attempt.head.contains(field);
    let refuses_here = format!("x-refuse-at: {}", attempt.agent);
    if asks("x-refuse: 1") || attempt.head.contains(&refuses_here) {
        return refuse(tunnel, attempt);
    }
    if asks("x-end: 1") {
        tunnel.close();
        return false;
    }
    answer(tunnel, attempt)
}

/// Name of the caller's connection in a request of the gateway to an agent.
fn told(attempt: &Attempt) -> Option<&str> {
    let fields = attempt.head.lines().filter_map(|line| {
        let (name, value) = line.split_once(": ")?;
        (name.replace('_', "-") == "x-gw-caller-connection").then_some(value)
    });
    let fields: Vec<&str> = fields.collect();
    assert!(fields.len() <= 1, "{}", attempt.head);
    fields.first().copied()
}

/// Sends a request; returns the status of the response, and the attempts.
fn call(
    scene: &Scene,
    scripted: &Scripted,
    caller: &mut Caller,
    fields: &str,
) -> (u16, Vec<Attempt>) {
    let status = caller
        .ask(scene.request("GET /", &format!("{fields}\r\n")))
        .status
        .as_u16();
    (status, scripted.attempts())
}

#[test]
fn a_connection_has_a_name_from_its_first_credentials_on() {
    let scene = Scene::service().enrolled(&["one"]).start();
    let scripted = Scripted::of(&scene, &["one"], act);
    let call = |caller: &mut Caller, fields: &str| {
        let (status, attempts) = call(&scene, &scripted, caller, fields);
        assert_eq!((status, attempts.len()), (200, 1));
        told(&attempts[0]).map(str::to_owned)
    };
    let mut names = Vec::new();
    for credentials in ["NTLM TlRM", "negotiate YII="] {
        let mut caller = scene.connect();
        assert_eq!(call(&mut caller, FORGED), None);
        assert_eq!(call(&mut caller, "Authorization: Basic YTpi\r\n"), None);
        let fields = format!("Authorization: {credentials}\r\n{FORGED}");
        let name = call(&mut caller, &fields).unwrap();
        assert_eq!(name.len(), 32);
        assert!(name.bytes().all(|byte| byte.is_ascii_hexdigit()) && !FORGED.contains(&name));
        for fields in ["", FORGED, "Authorization: Basic YTpi\r\n", &fields] {
            assert_eq!(call(&mut caller, fields).as_ref(), Some(&name), "{fields}");
        }
        names.push(name);
    }
    assert_ne!(names[0], names[1]);
}

/// Requests of other callers can be on the same connection of HTTP/2.
#[test]
fn a_connection_of_http2_has_no_name() {
    let scene = Scene::service().enrolled(&["one"]).start();
    let scripted = Scripted::of(&scene, &["one"], act);
    on_a_reactor(async {
        let builder = h2::client::Builder::new();
        let caller = http2_caller::connect_to(&scene.about, &builder).await;
        for (credentials, expected) in [("NTLM TlRM", Some("unnamed")), ("Basic YTpi", None)] {
            let request = caller.request(&http::Method::GET, "/");
            let request = request.header("authorization", credentials);
            assert_eq!(caller.fetch(request).await.status, 200);
            assert_eq!(told(&scripted.attempts()[0]), expected);
        }
    });
}

#[test]
fn requests_of_a_named_connection_go_to_its_agent_alone() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let scripted = Scripted::of(&scene, &["one", "two"], act);
    let mut caller = scene.connect();
    // No agent has a connection of this one yet.
    let first = "Authorization: NTLM TlRM\r\nX-Refuse: 1\r\n";
    let (status, attempts) = call(&scene, &scripted, &mut caller, first);
    assert_eq!((status, attempts.len()), (200, 2));
    assert_eq!(told(&attempts[0]), told(&attempts[1]));
    let agent = attempts[1].agent;
    for _ in 0..10 {
        for (fields, expected) in [("", 200), ("X-Refuse: 1\r\n", 502)] {
            let (status, attempts) = call(&scene, &scripted, &mut caller, fields);
            assert_eq!((status, attempts.len()), (expected, 1));
            assert_eq!(attempts[0].agent, agent);
        }
    }
    let (status, attempts) = call(&scene, &scripted, &mut caller, "X-End: 1\r\n");
    let agents: Vec<usize> = attempts.iter().map(|attempt| attempt.agent).collect();
    assert_eq!((status, agents), (200, vec![agent, 1 - agent]));
    let (status, attempts) = call(&scene, &scripted, &mut caller, "");
    assert_eq!((status, attempts[0].agent), (200, 1 - agent));
}

#[test]
fn a_named_connection_leaves_an_agent_that_is_not_in_order() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let scripted = Scripted::of(&scene, &["one", "two"], act);
    let mut caller = scene.connect();
    let first = "Authorization: NTLM TlRM\r\n";
    let (_, attempts) = call(&scene, &scripted, &mut caller, first);
    let agent = attempts[0].agent;
    let refuse = format!("X-Refuse-At: {agent}\r\n");
    // Requests that reach no backend open the breaker, which is closed again for a probe after a
    // while.
    for refused in 0.. {
        let (status, attempts) = call(&scene, &scripted, &mut caller, &refuse);
        if attempts.last().unwrap().agent != agent {
            assert_eq!(status, 200);
            break;
        }
        assert!(status == 502 && refused < 20, "{status}, {refused} refused");
    }
}
