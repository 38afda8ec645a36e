//! Backends that end a connection when a further request arrives on it.

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::scene::Scene;

/// Answers one request of each connection, and closes at the next one.
fn of_one_request() -> String {
    backend::start(|mut peer| {
        if peer.request().is_ok() {
            peer.send("HTTP/1.1 204 No Content\r\n\r\n");
            let _ = peer.request();
        }
    })
}

#[test]
fn a_safe_request_is_repeated_unless_retries_of_the_service_is_off() {
    let scene = Scene::service().agent_to(of_one_request()).start();
    let mut caller = scene.connect();
    let mut send = || caller.ask(scene.get("/")).status;
    for _ in 0..10 {
        assert_eq!(send(), 204);
    }
    scene.set_retries(false);
    eventually("the agent repeats no request", || {
        (send() == 502).then_some(())
    });
    scene.set_retries(true);
    eventually("the agent repeats requests again", || {
        (0..10).all(|_| send() == 204).then_some(())
    });
}
