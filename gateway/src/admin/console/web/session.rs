//! Who is signed in. In memory: whoever restarts the gateway signs in again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use gw_shared::id::random_base62;
use gw_shared::identity::secret::{Secret, SecretHash};

use crate::control::SECRET_LENGTH;

/// From signing in, however busy.
pub(crate) const LIFETIME: Duration = Duration::from_hours(12);
/// One more: the oldest ends.
const SESSIONS_MAX: usize = 256;

/// Sessions by the hash of their id; the id itself is the browser's alone.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<[u8; 32], Instant>>);

impl Sessions {
    /// Begins a session, and returns its id.
    pub(crate) fn open(&self, now: Instant) -> Secret {
        let id = new_id();
        let mut sessions = self.lock();
        sessions.retain(|_, expires| *expires > now);
        if sessions.len() >= SESSIONS_MAX
            && let Some(oldest) = sessions.iter().min_by_key(|(_, expires)| **expires).map(|(key, _)| *key)
        {
            sessions.remove(&oldest);
        }
        sessions.insert(key(id.reveal()), now + LIFETIME);
        id
    }

    pub(crate) fn is_open(&self, id: &str, now: Instant) -> bool {
        self.lock().get(&key(id)).is_some_and(|expires| *expires > now)
    }

    pub(crate) fn close(&self, id: &str) {
        self.lock().remove(&key(id));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 32], Instant>> {
        // Whole at any time.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// 256 random bits.
pub(crate) fn new_id() -> Secret {
    Secret::new(random_base62(SECRET_LENGTH))
}

/// Whether this can be one of [`new_id`]'s.
pub(crate) fn is_id(id: &str) -> bool {
    id.len() == SECRET_LENGTH && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn key(id: &str) -> [u8; 32] {
    let mut key = [0; 32];
    key.copy_from_slice(SecretHash::of(id).as_bytes());
    key
}

/// What the forms of a session carry: only who can read our pages knows it, and it does not tell the id.
pub(crate) fn form_token(id: &str) -> String {
    URL_SAFE_NO_PAD.encode(SecretHash::of(&format!("form of {id}")).as_bytes())
}

/// Whether somebody sent the form token, in time that tells nothing of it.
pub(crate) fn is_form_token(expected: &str, sent: &str) -> bool {
    SecretHash::of(expected).matches(sent)
}

/// A cookie of ours. Over https it has the prefix that only this host, over https, can set (RFC 6265bis §4.1.3).
#[derive(Clone, Copy)]
pub(crate) struct Cookie(&'static str);

/// The session.
pub(crate) const SESSION: Cookie = Cookie("gw_session");
/// Ties the sign-in form to the browser that asked for it.
pub(crate) const SIGN_IN: Cookie = Cookie("gw_sign_in");
/// Light or dark.
pub(crate) const THEME: Cookie = Cookie("gw_theme");

impl Cookie {
    pub(crate) fn of(self, headers: &HeaderMap) -> Option<&str> {
        let name = self.name(is_https(headers));
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
        cookies
            .flat_map(|line| line.split(';'))
            .find_map(|pair| pair.trim().strip_prefix(name.as_str())?.strip_prefix('='))
    }

    /// The `Set-Cookie` that gives it this value, or, empty and with no lifetime, takes it away.
    pub(crate) fn set(self, headers: &HeaderMap, value: &str, lifetime: Duration) -> String {
        let https = is_https(headers);
        let secure = if https { "; Secure" } else { "" };
        let (name, seconds) = (self.name(https), lifetime.as_secs());
        format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}{secure}")
    }

    fn name(self, https: bool) -> String {
        let prefix = if https { "__Host-" } else { "" };
        format!("{prefix}{}", self.0)
    }
}

/// Whether the browser came by https, to the proxy that is in front of us then. Who lies about it gets a cookie that its
/// browser will not send.
fn is_https(headers: &HeaderMap) -> bool {
    let proto = headers.get("x-forwarded-proto").and_then(|value| value.to_str().ok());
    proto.and_then(|list| list.split(',').next()).is_some_and(|first| first.trim().eq_ignore_ascii_case("https"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_lasts_until_it_is_closed_or_expires() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let (first, second) = (sessions.open(now), sessions.open(now));
        let last = now + LIFETIME - Duration::from_secs(1);
        assert!(is_id(first.reveal()) && !is_id("") && !is_id(&first.reveal().replace(|_| true, "=")));
        assert!(sessions.is_open(first.reveal(), last) && sessions.is_open(second.reveal(), last));
        assert!(!sessions.is_open(first.reveal(), now + LIFETIME) && !sessions.is_open("", now));
        sessions.close(first.reveal());
        assert!(!sessions.is_open(first.reveal(), now) && sessions.is_open(second.reveal(), now));
    }

    #[test]
    fn one_session_too_many_ends_the_oldest() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let oldest = sessions.open(now);
        let later = now + Duration::from_secs(1);
        let others: Vec<Secret> = (1..SESSIONS_MAX).map(|_| sessions.open(later)).collect();
        assert!(sessions.is_open(oldest.reveal(), later));
        let newest = sessions.open(later);
        assert!(!sessions.is_open(oldest.reveal(), later) && sessions.is_open(newest.reveal(), later));
        assert!(others.iter().all(|other| sessions.is_open(other.reveal(), later)));
    }

    #[test]
    fn cookies_are_found_by_their_whole_name() {
        let mut headers = HeaderMap::new();
        headers.insert(header::COOKIE, "a=1; gw_session2=x; gw_session=me;b".parse().unwrap());
        assert_eq!(SESSION.of(&headers), Some("me"));
        headers.insert("x-forwarded-proto", "https".parse().unwrap());
        assert_eq!(SESSION.of(&headers), None);
        let set = SESSION.set(&headers, "me", LIFETIME);
        assert_eq!(set, "__Host-gw_session=me; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure");
    }
}
