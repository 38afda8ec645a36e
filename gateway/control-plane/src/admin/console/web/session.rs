//! Sessions of the console and their cookies. Kept in memory only: a restart of the gateway ends
//! all its sessions, but for those that other nodes of the region know.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use gw_shared::id::{SECRET_LENGTH, random_base62};
use gw_shared::identity::secret::{Secret, SecretHash};
use serde::Deserialize;

/// Absolute lifetime, regardless of activity.
pub(crate) const LIFETIME: Duration = Duration::from_hours(12);
/// Opening one more forgets the oldest.
const SESSIONS_MAX: usize = 256;

/// SHA-256 of a session id. Only the browser has the id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct SessionKey([u8; 32]);

/// A session of the last twelve hours.
#[derive(Clone, Copy)]
struct ConsoleSession {
    expires: Instant,
    /// Ended sessions are kept too, so that another node that was not told cannot open them again.
    is_ended: bool,
}

#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<SessionKey, ConsoleSession>>);

impl SessionKey {
    /// `None` if `id` does not have the form of an id.
    pub(crate) fn of(id: &str) -> Option<Self> {
        is_id(id).then(|| Self::of_hash(&SecretHash::of(id)))
    }

    fn of_hash(hash: &SecretHash) -> Self {
        let mut key = [0; 32];
        key.copy_from_slice(hash.as_bytes());
        Self(key)
    }
}

impl fmt::Display for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl TryFrom<String> for SessionKey {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let bytes = URL_SAFE_NO_PAD
            .decode(text)
            .ok()
            .and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or("not the hash of a session id")
    }
}

impl Sessions {
    /// Opens a session and returns its id.
    pub(crate) fn open(&self, now: Instant) -> Secret {
        let id = new_id();
        let key = SessionKey::of_hash(&SecretHash::of(id.reveal()));
        put(
            &mut self.lock(),
            key,
            ConsoleSession {
                expires: now + LIFETIME,
                is_ended: false,
            },
            now,
        );
        id
    }

    /// Adds a session that another node opened, unless it is known.
    pub(crate) fn learn(&self, key: SessionKey, now: Instant, remaining: Duration) {
        let mut sessions = self.lock();
        if !sessions.contains_key(&key) {
            put(
                &mut sessions,
                key,
                ConsoleSession {
                    expires: now + remaining,
                    is_ended: false,
                },
                now,
            );
        }
    }

    /// `None` if the session is not known here.
    pub(crate) fn is_open(&self, key: SessionKey, now: Instant) -> Option<bool> {
        let session = *self.lock().get(&key)?;
        Some(!session.is_ended && session.expires > now)
    }

    /// Time until an open session expires.
    pub(crate) fn remaining(&self, key: SessionKey, now: Instant) -> Option<Duration> {
        let session = *self.lock().get(&key).filter(|session| !session.is_ended)?;
        session
            .expires
            .checked_duration_since(now)
            .filter(|remaining| !remaining.is_zero())
    }

    pub(crate) fn close(&self, key: SessionKey, now: Instant) {
        put(
            &mut self.lock(),
            key,
            ConsoleSession {
                expires: now + LIFETIME,
                is_ended: true,
            },
            now,
        );
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionKey, ConsoleSession>> {
        // Consistent even after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds or replaces a session. Beyond the limit, ended sessions are forgotten first, and then the
/// oldest.
fn put(
    sessions: &mut HashMap<SessionKey, ConsoleSession>,
    key: SessionKey,
    session: ConsoleSession,
    now: Instant,
) {
    sessions.retain(|_, session| session.expires > now);
    let oldest = sessions
        .iter()
        .min_by_key(|(_, session)| (!session.is_ended, session.expires))
        .map(|(key, _)| *key);
    if sessions.len() >= SESSIONS_MAX
        && !sessions.contains_key(&key)
        && let Some(oldest) = oldest
    {
        sessions.remove(&oldest);
    }
    sessions.insert(key, session);
}

/// A random id of 256 bits.
pub(crate) fn new_id() -> Secret {
    Secret::new(random_base62(SECRET_LENGTH))
}

/// Whether `id` has the form of an id of [`new_id`].
pub(crate) fn is_id(id: &str) -> bool {
    id.len() == SECRET_LENGTH && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// The token in the forms of a session, against cross-site request forgery. Derived from the id by
/// a hash, so that it does not reveal the id.
pub(crate) fn form_token(id: &str) -> String {
    URL_SAFE_NO_PAD.encode(SecretHash::of(&format!("form of {id}")).as_bytes())
}

/// Compares the form token in constant time.
pub(crate) fn is_form_token(expected: &str, sent: &str) -> bool {
    SecretHash::of(expected).matches(sent)
}

/// A cookie of the console. Over https its name has the prefix `__Host-`, which only this host can
/// set over https (RFC 6265bis §4.1.3).
#[derive(Clone, Copy)]
pub(crate) struct ConsoleCookie(&'static str);

/// The session id.
pub(crate) const SESSION: ConsoleCookie = ConsoleCookie("gw_session");
/// Ties the sign-in form to the browser that requested it.
pub(crate) const SIGN_IN: ConsoleCookie = ConsoleCookie("gw_sign_in");
/// The colour theme.
pub(crate) const THEME: ConsoleCookie = ConsoleCookie("gw_theme");

impl ConsoleCookie {
    pub(crate) fn of(self, headers: &HeaderMap) -> Option<&str> {
        let name = self.name(is_https(headers));
        let cookies = headers
            .get_all(header::COOKIE)
            .iter()
            .filter_map(|line| line.to_str().ok());
        cookies
            .flat_map(|line| line.split(';'))
            .find_map(|pair| pair.trim().strip_prefix(name.as_str())?.strip_prefix('='))
    }

    /// The `Set-Cookie` value that sets the cookie; an empty value with zero lifetime deletes it.
    pub(crate) fn set(self, headers: &HeaderMap, value: &str, lifetime: Duration) -> String {
        let https = is_https(headers);
        let secure = if https { "; Secure" } else { "" };
        let name = self.name(https);
        let seconds = lifetime.as_secs();
        format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}{secure}")
    }

    fn name(self, https: bool) -> String {
        let prefix = if https { "__Host-" } else { "" };
        format!("{prefix}{}", self.0)
    }
}

/// Whether the browser uses https, through a proxy in front of the console. A client that sends a
/// false value only gets a cookie that its browser does not return.
pub(crate) fn is_https(headers: &HeaderMap) -> bool {
    let proto = headers
        .get("x-forwarded-proto")
        .and_then(|value| value.to_str().ok());
    proto
        .and_then(|list| list.split(',').next())
        .is_some_and(|first| first.trim().eq_ignore_ascii_case("https"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &Secret) -> SessionKey {
        SessionKey::of(id.reveal()).unwrap()
    }

    #[test]
    fn a_session_ends_when_closed_or_expired() {
        let sessions = Sessions::default();
        let now = Instant::now();
        let first = sessions.open(now);
        let second = sessions.open(now);
        let last = now + LIFETIME - Duration::from_secs(1);
        assert!(
            is_id(first.reveal()) && !is_id("") && !is_id(&first.reveal().replace(|_| true, "="))
        );
        let [first, second] = [key(&first), key(&second)];
        assert_eq!(
            [first, second].map(|key| sessions.is_open(key, last)),
            [Some(true); 2]
        );
        assert_eq!(sessions.is_open(first, now + LIFETIME), Some(false));
        assert_eq!(
            sessions.remaining(first, last),
            Some(Duration::from_secs(1))
        );
        sessions.close(first, now);
        assert_eq!(
            [first, second].map(|key| sessions.is_open(key, now)),
            [Some(false), Some(true)]
        );
        assert_eq!(
            [first, second].map(|key| sessions.remaining(key, now)),
            [None, Some(LIFETIME)]
        );
    }

    #[test]
    fn a_session_of_another_node_is_learned_until_it_has_ended() {
        let here = Sessions::default();
        let there = Sessions::default();
        let now = Instant::now();
        let key = key(&there.open(now));
        assert_eq!(here.is_open(key, now), None);
        here.learn(key, now, Duration::from_secs(60));
        assert_eq!(here.remaining(key, now), Some(Duration::from_secs(60)));
        here.close(key, now);
        here.learn(key, now, Duration::from_secs(60));
        assert_eq!(here.is_open(key, now), Some(false));
    }

    #[test]
    fn keys_are_read_back_from_text() {
        let key = key(&new_id());
        assert_eq!(SessionKey::try_from(key.to_string()), Ok(key));
        assert!(
            SessionKey::try_from("AAAA".to_owned()).is_err()
                && SessionKey::of("not an id").is_none()
        );
    }

    #[test]
    fn opening_one_session_too_many_ends_the_oldest() {
        let sessions = Sessions::default();
        let now = Instant::now();
        let oldest = key(&sessions.open(now));
        let later = now + Duration::from_secs(1);
        let others: Vec<Secret> = (1..SESSIONS_MAX).map(|_| sessions.open(later)).collect();
        assert_eq!(sessions.is_open(oldest, later), Some(true));
        let newest = key(&sessions.open(later));
        assert_eq!(
            [oldest, newest].map(|key| sessions.is_open(key, later)),
            [None, Some(true)]
        );
        assert!(
            others
                .iter()
                .all(|other| sessions.is_open(key(other), later) == Some(true))
        );
    }

    #[test]
    fn cookies_are_matched_by_their_whole_name() {
        let mut headers = HeaderMap::new();
        headers.insert(
            header::COOKIE,
            "a=1; gw_session2=x; gw_session=me;b".parse().unwrap(),
        );
        assert_eq!(SESSION.of(&headers), Some("me"));
        headers.insert("x-forwarded-proto", "https".parse().unwrap());
        assert_eq!(SESSION.of(&headers), None);
        let set = SESSION.set(&headers, "me", LIFETIME);
        assert_eq!(
            set,
            "__Host-gw_session=me; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure"
        );
    }
}
