//! Connections to which a backend binds the identity of a user (RFC 4559 §6).

use gw_shared::http::caller_connection::CallerConnection;

use super::tunnel::Gateway;
use super::*;

/// A challenge with a token, which begins to bind an identity.
const TOKEN: &str = "Negotiate, NTLM TlRMTVNTUAAC";

/// Starts a backend that answers with the number of the connection, and with the `X-Challenge` of
/// the request as a challenge.
fn numbering() -> Vec<String> {
    http1_answers(|head, number| {
        assert!(!head.contains("x-gw-caller-connection"), "{head}");
        if head.contains("upgrade: name") {
            let switch = "HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: name\r\n\r\n";
            return format!("{switch}{number:03}");
        }
        let challenge = field(head, "x-challenge").unwrap_or("Basic");
        format!(
            "HTTP/1.1 401 X\r\nWWW-Authenticate: {challenge}\r\nContent-Length: 3\r\n\r\n\
             {number:03}"
        )
    })
}

/// Sends a request that came on this connection of a caller. Returns the number of the connection
/// to the backend.
async fn number(
    gateway: &Gateway,
    caller: Option<CallerConnection>,
    challenge: &'static str,
) -> String {
    let exchange = gateway.send(OutboundRequest {
        caller_connection: caller,
        ..with_field(get("/"), "x-challenge", challenge)
    });
    assert_eq!(exchange.response().await.head.status, 401);
    exchange.body().await.unwrap()
}

#[test]
fn a_shared_connection_whose_response_has_a_token_is_closed() {
    with_tunnel(&numbering(), |gateway| async move {
        for (challenge, expected) in [
            ("NTLM", "000"),
            ("Negotiate, NTLM", "000"),
            (TOKEN, "000"),
            ("Basic", "001"),
            ("negotiate oRQ=", "001"),
            ("NTLM", "002"),
        ] {
            let found = number(&gateway, None, challenge).await;
            assert_eq!(found, expected, "{challenge}");
        }
    });
}

#[test]
fn each_name_has_connections_of_its_own() {
    with_tunnel(&numbering(), |gateway| async move {
        let [one, other] = [(); 2].map(|()| Some(CallerConnection::name_randomly()));
        let unnamed = Some(CallerConnection::Unnamed);
        for (caller, expected) in [
            (None, "000"),
            (one, "001"),
            (one, "001"),
            (other, "002"),
            (None, "000"),
            (unnamed, "003"),
            (one, "001"),
            (unnamed, "004"),
            (other, "002"),
            (None, "000"),
        ] {
            let challenge = if caller.is_some() { TOKEN } else { "NTLM" };
            assert_eq!(number(&gateway, caller, challenge).await, expected);
        }
    });
}

#[test]
fn an_upgrade_takes_the_connection_of_its_name() {
    with_tunnel(&numbering(), |gateway| async move {
        let [one, other] = [(); 2].map(|()| Some(CallerConnection::name_randomly()));
        assert_eq!(number(&gateway, one, TOKEN).await, "000");
        for (caller, expected) in [(other, "001"), (one, "000"), (one, "002")] {
            let exchange = gateway.send(OutboundRequest {
                caller_connection: caller,
                ..upgrade("name")
            });
            assert_eq!(exchange.response().await.head.status, 101);
            assert_eq!(exchange.bytes(3).await, expected.as_bytes());
        }
    });
}

#[test]
fn the_longest_idle_of_more_private_connections_than_slots_is_closed() {
    with_tunnel(&numbering(), |gateway| async move {
        let mut callers = Vec::new();
        for opened in 0..128 {
            let caller = Some(CallerConnection::name_randomly());
            let found = number(&gateway, caller, TOKEN).await;
            assert_eq!(found, format!("{opened:03}"));
            callers.push(caller);
        }
        assert_eq!(number(&gateway, callers[0], "Basic").await, "000");
        let further = Some(CallerConnection::name_randomly());
        assert_eq!(number(&gateway, further, TOKEN).await, "128");
        assert_eq!(number(&gateway, callers[0], "Basic").await, "000");
        assert_eq!(number(&gateway, callers[2], "Basic").await, "002");
        assert_eq!(number(&gateway, callers[1], "Basic").await, "129");
    });
}
