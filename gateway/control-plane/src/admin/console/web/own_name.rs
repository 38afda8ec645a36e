//! Names of the console on loopback. Cookies have no port: what a browser keeps for `localhost` or
//! an IP address, it sends to every server of the machine, also to those of other users. So a
//! session that begins under the console's own name gets a random name below it, which no other
//! server knows.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, header};
use gw_shared::id::random_base62;
use gw_shared::identity::secret::{Secret, SecretHash};

use super::forms::kept::KeptForm;
use super::session;
use super::theme::Theme;
use crate::admin_client::CONSOLE_NAME;

/// Length of the random label: 26 lowercase letters and digits hold more than 128 bits.
const LABEL_LENGTH: usize = 26;
/// Time for the browser to follow the redirect to the name of its session.
const MOVED_WITHIN: Duration = Duration::from_secs(60);
/// Sessions that may be on their way at the same time. One more forgets the oldest.
const MOVES_MAX: usize = 16;

/// `Host` of a request over http under the console's own name, or a name below it.
pub(crate) struct OwnName {
    /// `:` and the port, as the browser has it; empty for port 80.
    port: String,
}

impl OwnName {
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let (name, port) = name_and_port(headers)?;
        let is_own = name
            .strip_suffix(CONSOLE_NAME)
            .is_some_and(|below| below.is_empty() || below.ends_with('.'));
        is_own.then_some(Self { port })
    }

    /// The origins of sessions, as a source of a Content Security Policy.
    pub(crate) fn sources(&self) -> String {
        format!("http://*.{CONSOLE_NAME}{}", self.port)
    }
}

/// The address under which the console has a name of its own, if this request came over http under
/// one that other servers of the machine share.
pub(crate) fn address_instead(headers: &HeaderMap) -> Option<String> {
    let (name, port) = name_and_port(headers)?;
    let ip = name
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>();
    let is_shared = name == "localhost" || ip.is_ok_and(|ip| ip.is_loopback());
    is_shared.then(|| format!("http://{CONSOLE_NAME}{port}/"))
}

fn name_and_port(headers: &HeaderMap) -> Option<(String, String)> {
    let host: Authority = headers.get(header::HOST)?.to_str().ok()?.parse().ok()?;
    let port = host
        .port_u16()
        .map_or_else(String::new, |port| format!(":{port}"));
    let name = host.host().trim_end_matches('.').to_ascii_lowercase();
    (!session::is_https(headers)).then_some((name, port))
}

/// Sessions that wait for their browser at the name of the session.
#[derive(Default)]
pub(crate) struct Moves(Mutex<VecDeque<Move>>);

struct Move {
    code: SecretHash,
    /// Name and port of the session.
    host: String,
    arrival: Arrival,
    expires: Instant,
}

/// What a browser gets at the name of its session.
pub(crate) struct Arrival {
    pub(crate) session: Secret,
    pub(crate) theme: Theme,
    /// A form that was sent after the session before had ended.
    pub(crate) kept: Option<KeptForm>,
}

impl Moves {
    /// Gives a session a name. Returns the host, and the code with which the browser gets the
    /// session there, once.
    pub(crate) fn begin(
        &self,
        own: &OwnName,
        session: Secret,
        theme: Theme,
        kept: Option<KeptForm>,
        now: Instant,
    ) -> (String, Secret) {
        let label = random_base62(LABEL_LENGTH).to_ascii_lowercase();
        let host = format!("{label}.{CONSOLE_NAME}{}", own.port);
        let secret = session::new_id();
        let code = SecretHash::of(secret.reveal());
        let expires = now + MOVED_WITHIN;
        let mut moves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while moves.len() >= MOVES_MAX {
            moves.pop_front();
        }
        moves.push_back(Move {
            code,
            host: host.clone(),
            arrival: Arrival {
                session,
                theme,
                kept,
            },
            expires,
        });
        (host, secret)
    }

    /// The session of this code at this host.
    pub(crate) fn end(&self, code: &str, host: &str, now: Instant) -> Option<Arrival> {
        let mut moves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        moves.retain(|it| it.expires > now);
        let index = moves
            .iter()
            .position(|it| it.code.matches(code) && it.host.eq_ignore_ascii_case(host))?;
        moves.remove(index).map(|it| it.arrival)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(host: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HOST, host.parse().unwrap())])
    }

    #[test]
    fn names_that_other_servers_share_are_told_apart_from_the_consoles_own() {
        let own = |host: &str| OwnName::of(&headers(host)).map(|own| own.sources());
        let wildcard = |port: &str| Some(format!("http://*.console.gw.localhost{port}"));
        assert_eq!(own("console.gw.localhost:9080"), wildcard(":9080"));
        assert_eq!(own("X.Console.gw.localhost."), wildcard(""));
        assert_eq!(
            [
                own("myconsole.gw.localhost"),
                own("gw.localhost"),
                own("127.0.0.1")
            ],
            [None, None, None]
        );
        for shared in [
            "127.0.0.1:9080",
            "127.8.8.8:9080",
            "[::1]:9080",
            "LOCALHOST:9080",
        ] {
            let instead = address_instead(&headers(shared));
            assert_eq!(
                instead.as_deref(),
                Some("http://console.gw.localhost:9080/"),
                "{shared}"
            );
        }
        for other in [
            "console.gw.localhost:9080",
            "10.0.0.7:9080",
            "admin.example.org",
            "x.localhost",
        ] {
            assert_eq!(address_instead(&headers(other)), None, "{other}");
        }
        let mut behind_proxy = headers("localhost");
        behind_proxy.insert("x-forwarded-proto", "https".parse().unwrap());
        assert_eq!(address_instead(&behind_proxy), None);
    }

    #[test]
    fn a_session_is_handed_over_once_at_its_name_and_in_time() {
        let moves = Moves::default();
        let now = Instant::now();
        let own = OwnName {
            port: ":1".to_owned(),
        };
        let begin = |session: &str| {
            moves.begin(
                &own,
                Secret::new(session.to_owned()),
                Theme::Dark,
                None,
                now,
            )
        };
        let (host, code) = begin("a");
        assert!(
            host.ends_with(".console.gw.localhost:1") && host.len() == LABEL_LENGTH + 23,
            "{host}"
        );
        let end = |code: &str, host: &str, at| {
            moves
                .end(code, host, at)
                .map(|arrival| (arrival.session.reveal().to_owned(), arrival.theme))
        };
        assert_eq!(end(code.reveal(), "console.gw.localhost:1", now), None);
        assert_eq!(end("", &host, now), None);
        assert_eq!(
            end(code.reveal(), &host, now),
            Some(("a".to_owned(), Theme::Dark))
        );
        assert_eq!(end(code.reveal(), &host, now), None);
        let (host, code) = begin("b");
        assert_eq!(end(code.reveal(), &host, now + MOVED_WITHIN), None);
        let (host, code) = begin("oldest");
        let others: Vec<_> = (0..MOVES_MAX).map(|_| begin("c")).collect();
        assert_eq!(end(code.reveal(), &host, now), None);
        assert!(
            others
                .iter()
                .all(|(host, code)| end(code.reveal(), host, now).is_some())
        );
    }
}
