//! Sessions of the console and their cookies. Kept in memory only, so a restart of the gateway ends all sessions.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use gw_shared::id::random_base62;
use gw_shared::identity::secret::{Secret, SecretHash};

use crate::control::SECRET_LENGTH;

/// Absolute lifetime, regardless of activity.
pub(crate) const LIFETIME: Duration = Duration::from_hours(12);
/// Opening one more ends the oldest.
const SESSIONS_MAX: usize = 256;

/// Open sessions with their expiry, by the hash of their id. Only the browser has the id.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<[u8; 32], Instant>>);

impl Sessions {
    /// Opens a session and returns its id.
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
        // Consistent even after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A random id of 256 bits.
pub(crate) fn new_id() -> Secret {
    Secret::new(random_base62(SECRET_LENGTH))
}

/// Whether `id` has the form of an id of [`new_id`].
pub(crate) fn is_id(id: &str) -> bool {
    id.len() == SECRET_LENGTH && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn key(id: &str) -> [u8; 32] {
    let mut key = [0; 32];
    key.copy_from_slice(SecretHash::of(id).as_bytes());
    key
}

/// The token in the forms of a session, against cross-site request forgery. Derived from the id by a hash, so that it
/// does not reveal the id.
pub(crate) fn form_token(id: &str) -> String {
    URL_SAFE_NO_PAD.encode(SecretHash::of(&format!("form of {id}")).as_bytes())
}

/// Compares the form token in constant time.
pub(crate) fn is_form_token(expected: &str, sent: &str) -> bool {
    SecretHash::of(expected).matches(sent)
}

/// A cookie of the console. Over https its name has the prefix `__Host-`, which only this host can set over https (RFC
/// 6265bis §4.1.3).
#[derive(Clone, Copy)]
pub(crate) struct Cookie(&'static str);

/// The session id.
pub(crate) const SESSION: Cookie = Cookie("gw_session");
/// Ties the sign-in form to the browser that requested it.
pub(crate) const SIGN_IN: Cookie = Cookie("gw_sign_in");
/// The colour theme.
pub(crate) const THEME: Cookie = Cookie("gw_theme");

impl Cookie {
    pub(crate) fn of(self, headers: &HeaderMap) -> Option<&str> {
        let name = self.name(is_https(headers));
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
        cookies
            .flat_map(|line| line.split(';'))
            .find_map(|pair| pair.trim().strip_prefix(name.as_str())?.strip_prefix('='))
    }

    /// The `Set-Cookie` value that sets the cookie; an empty value with zero lifetime deletes it.
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

/// Whether the browser uses https, through a proxy in front of the console. A client that sends a false value only gets
/// a cookie that its browser does not return.
fn is_https(headers: &HeaderMap) -> bool {
    let proto = headers.get("x-forwarded-proto").and_then(|value| value.to_str().ok());
    proto.and_then(|list| list.split(',').next()).is_some_and(|first| first.trim().eq_ignore_ascii_case("https"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_ends_when_closed_or_expired() {
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
    fn opening_one_session_too_many_ends_the_oldest() {
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
    fn cookies_are_matched_by_their_whole_name() {
        let mut headers = HeaderMap::new();
        headers.insert(header::COOKIE, "a=1; gw_session2=x; gw_session=me;b".parse().unwrap());
        assert_eq!(SESSION.of(&headers), Some("me"));
        headers.insert("x-forwarded-proto", "https".parse().unwrap());
        assert_eq!(SESSION.of(&headers), None);
        let set = SESSION.set(&headers, "me", LIFETIME);
        assert_eq!(set, "__Host-gw_session=me; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure");
    }
}
