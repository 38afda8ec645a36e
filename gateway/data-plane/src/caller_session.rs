//! The session of a request: what its agent is chosen by, if the service has an affinity.
//!
//! The value of the gateway's cookie is base64url of 16 random bytes and the first 16 bytes of an
//! HMAC-SHA-256 over the service and them. A caller cannot make one up to choose its agent, and a
//! cookie of one service is of no use at another.

use std::net::IpAddr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::{hmac, rand};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use gw_base::client_address::{TrustedProxies, client_address};
use gw_base::service::affinity::{Affinity, AffinityKey, CookieName};
use gw_interface::rate_limit::AddressKey;
use gw_shared::http::Fields;
use gw_shared::http::fields::X_FORWARDED_FOR;
use gw_shared::tunnel::head::OutboundRequest;
use gw_store::Service;
use http::header::{self, HeaderName, HeaderValue};

/// Random bytes of a cookie, and bytes of its signature.
const HALF: usize = 16;
/// Characters of a cookie's value: base64url of both halves.
const VALUE: usize = 43;
/// Cookies of one request that are verified. A browser sends several of one name if another host of
/// the region's domain has set some for the whole domain.
const VERIFIED_MAX: usize = 4;
/// Browsers send the cookie also where a page of another site calls the service or shows it in a
/// frame, and keep one for each such site (`Partitioned`). It ends with the session of the browser.
const ATTRIBUTES: &str = "; Path=/; Secure; HttpOnly; SameSite=None; Partitioned";

/// Finds the sessions of requests. The owner of a service asks it before it chooses a tunnel.
pub(crate) struct CallerSessions {
    key: AffinityKey,
    trusted_proxies: TrustedProxies,
}

/// The session of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CallerSession {
    /// The same for all requests of a session, at each worker and node and after each start; `None`
    /// if the request has no session.
    pub(crate) hash: Option<u64>,
    /// Value of a `Set-Cookie` field for the response.
    pub(crate) set_cookie: Option<HeaderValue>,
}

impl CallerSessions {
    pub(crate) fn new(key: AffinityKey, trusted_proxies: TrustedProxies) -> Self {
        Self {
            key,
            trusted_proxies,
        }
    }

    /// Whether a proxy at this address may tell the address of a caller.
    pub(crate) fn trusts(&self, address: IpAddr) -> bool {
        self.trusted_proxies.contains(address)
    }

    /// The session of a request to `service`. Removes the gateway's cookie from the request.
    pub(crate) fn of(&self, service: &Service, request: &mut OutboundRequest) -> CallerSession {
        let hash = match &service.settings.affinity {
            Affinity::None => None,
            Affinity::Cookie(name) => {
                return self.of_cookie(&service.label, name, &mut request.headers);
            }
            Affinity::Header(name) => hash_of_field(&request.headers, name),
            Affinity::Client => hash_of_client(&request.headers, &self.trusted_proxies),
        };
        CallerSession {
            hash,
            set_cookie: None,
        }
    }

    /// The session of the first valid cookie, or a new one.
    fn of_cookie(&self, label: &str, name: &CookieName, headers: &mut Fields) -> CallerSession {
        let mut found = None;
        let mut verified = 0;
        take_cookies(headers, name, |value| {
            if found.is_none() && verified < VERIFIED_MAX && value.len() == VALUE {
                verified += 1;
                found = SessionCookie::verified(value, label, &self.key);
            }
        });
        if let Some(cookie) = found {
            return CallerSession {
                hash: Some(cookie.hash()),
                set_cookie: None,
            };
        }
        let mut random = [0; HALF];
        if rand::fill(&mut random).is_err() {
            // The request is relayed all the same, by an agent of the gateway's choice.
            return CallerSession::default();
        }
        let cookie = SessionCookie { random };
        CallerSession {
            hash: Some(cookie.hash()),
            set_cookie: cookie.set_cookie(name, label, &self.key),
        }
    }
}

/// A session that the gateway has begun.
struct SessionCookie {
    random: [u8; HALF],
}

impl SessionCookie {
    /// Parses the value of a cookie; `None` if the gateway has not made it for this service.
    fn verified(value: &[u8], label: &str, key: &AffinityKey) -> Option<Self> {
        // One byte more than the value has: the decoder rounds up.
        let mut bytes = [0; 2 * HALF + 1];
        let length = URL_SAFE_NO_PAD.decode_slice(value, &mut bytes).ok()?;
        let (random, signature) = bytes[..length].split_first_chunk()?;
        let cookie = Self { random: *random };
        verify_slices_are_equal(&cookie.signature(label, key), signature).ok()?;
        Some(cookie)
    }

    fn signature(&self, label: &str, key: &AffinityKey) -> [u8; HALF] {
        let mut context = hmac::Context::with_key(key.hmac());
        // The border is unambiguous, because the second part has a fixed length.
        context.update(label.as_bytes());
        context.update(&self.random);
        let mut signature = [0; HALF];
        signature.copy_from_slice(&context.sign().as_ref()[..HALF]);
        signature
    }

    fn set_cookie(&self, name: &CookieName, label: &str, key: &AffinityKey) -> Option<HeaderValue> {
        let value = URL_SAFE_NO_PAD.encode([self.random, self.signature(label, key)].concat());
        let text = format!("{}={value}{ATTRIBUTES}", name.as_str());
        let mut value = HeaderValue::from_maybe_shared(Bytes::from(text)).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    fn hash(&self) -> u64 {
        first_u64(&self.random)
    }
}

/// Removes the cookies with this name from the `Cookie` field and passes their values to `each`.
/// Other cookies stay byte for byte; a field without others is removed. There is one field: several
/// were joined.
fn take_cookies(headers: &mut Fields, name: &CookieName, mut each: impl FnMut(&[u8])) {
    let Some(field) = headers.get(header::COOKIE) else {
        return;
    };
    let mut pairs = field.as_bytes().split(|byte| *byte == b';').peekable();
    let begins_with_it = pairs
        .peek()
        .is_some_and(|pair| value_of(pair, name).is_some());
    let mut is_there = false;
    let kept: Vec<&[u8]> = pairs
        .filter(|pair| match value_of(pair, name) {
            Some(value) => {
                is_there = true;
                each(value);
                false
            }
            None => true,
        })
        .collect();
    if !is_there {
        return;
    }
    let kept = kept.join(&b';');
    // The space between the removed cookie and the next one.
    let kept = if begins_with_it {
        kept.trim_ascii_start().to_vec()
    } else {
        kept
    };
    match HeaderValue::from_maybe_shared(Bytes::from(kept)) {
        Ok(kept) if !kept.is_empty() => headers.insert(header::COOKIE, kept),
        _ => drop(headers.remove(header::COOKIE)),
    }
}

/// The value of a cookie, if it has this name.
fn value_of<'a>(pair: &'a [u8], name: &CookieName) -> Option<&'a [u8]> {
    let equals = memchr::memchr(b'=', pair)?;
    (pair[..equals].trim_ascii() == name.as_str().as_bytes())
        .then(|| pair[equals + 1..].trim_ascii())
}

/// `None` without the field, or with an empty one.
fn hash_of_field(headers: &Fields, name: &HeaderName) -> Option<u64> {
    let value = headers.get(name)?.as_bytes();
    (!value.is_empty()).then(|| hash(value))
}

/// By the address of the client in `X-Forwarded-For`, whose last element is the peer of the gateway
/// that the client called. Addresses of one IPv6 /64 count as one client.
fn hash_of_client(headers: &Fields, trusted: &TrustedProxies) -> Option<u64> {
    let last = headers
        .get_all(X_FORWARDED_FOR)
        .next_back()?
        .to_str()
        .ok()?
        .rsplit(',')
        .next()?;
    let peer: IpAddr = last.trim().parse().ok()?;
    Some(
        match AddressKey::from(client_address(peer, headers, trusted)) {
            AddressKey::V4(address) => hash(&address.octets()),
            AddressKey::V6(network) => hash(&network),
        },
    )
}

fn hash(bytes: &[u8]) -> u64 {
    first_u64(digest(&SHA256, bytes).as_ref())
}

fn first_u64(bytes: &[u8]) -> u64 {
    bytes.first_chunk().copied().map_or(0, u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use gw_base::client_address::ProxyProtocol;
    use gw_base::clock::Timestamp;
    use gw_base::service::hostname::Region;
    use gw_base::service::service_settings::ServiceSettings;
    use gw_shared::http::Framing;
    use gw_store::{Directory, Records, ServiceRecord, StoredRecord};
    use http::Method;
    use http::uri::{Authority, PathAndQuery};
    use proptest::prelude::*;

    use super::*;

    fn sessions(key: u8) -> CallerSessions {
        let trusted = [("10.0.0.0/8".parse().unwrap(), ProxyProtocol::Off)];
        let key = AffinityKey::new(hmac::Key::new(hmac::HMAC_SHA256, &[key; 32]));
        CallerSessions::new(key, trusted.into_iter().collect())
    }

    fn service(id: &str, affinity: &str) -> std::sync::Arc<Service> {
        let record = ServiceRecord {
            account: "acme".parse().unwrap(),
            id: id.parse().unwrap(),
            settings: ServiceSettings {
                affinity: affinity.parse().unwrap(),
                ..ServiceSettings::default()
            },
            created_at: Timestamp(1),
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        };
        let records = Records::from_iter([StoredRecord::Service(record)]);
        let directory = Directory::new(&records, &Region::new("eu1", "example.com"), 1);
        directory.service(&format!("acme--{id}")).unwrap().clone()
    }

    fn request(fields: &[(&'static str, &str)]) -> OutboundRequest {
        let field = |(name, value): &(&'static str, &str)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            )
        };
        OutboundRequest {
            method: Method::GET,
            target: PathAndQuery::from_static("/"),
            authority: Authority::from_static("acme--api.eu1.example.com"),
            headers: fields.iter().map(field).collect(),
            framing: Framing::None,
            upgrade: None,
            caller_connection: None,
        }
    }

    /// The cookie of a new session, as `name=value`, and the hash of the session.
    fn begun(sessions: &CallerSessions, service: &Service) -> (String, u64) {
        let session = sessions.of(service, &mut request(&[]));
        let set_cookie = session.set_cookie.unwrap();
        assert!(set_cookie.is_sensitive());
        let (cookie, attributes) = set_cookie.to_str().unwrap().split_once(';').unwrap();
        assert_eq!(
            attributes,
            " Path=/; Secure; HttpOnly; SameSite=None; Partitioned"
        );
        (cookie.to_owned(), session.hash.unwrap())
    }

    fn cookie_field(request: &OutboundRequest) -> Option<&str> {
        request
            .headers
            .get(header::COOKIE)
            .map(|value| value.to_str().unwrap())
    }

    #[test]
    fn a_cookie_continues_its_session_at_each_node_and_is_not_passed_on() {
        let api = service("api", "cookie");
        let (cookie, hash) = begun(&sessions(1), &api);
        assert!(
            cookie.starts_with("gw_affinity=") && cookie.len() == "gw_affinity=".len() + VALUE,
            "{cookie}"
        );
        let mut request = request(&[
            ("cookie", &format!("a=1; {cookie}; b=\"2\"")),
            ("accept", "*/*"),
        ]);
        let session = sessions(1).of(&api, &mut request);
        assert_eq!(
            session,
            CallerSession {
                hash: Some(hash),
                set_cookie: None
            }
        );
        assert_eq!(cookie_field(&request), Some("a=1; b=\"2\""));
        assert_eq!(request.headers.len(), 2);
        let hashes: HashSet<u64> = (0..100).map(|_| begun(&sessions(1), &api).1).collect();
        assert_eq!(hashes.len(), 100, "each session is another");
    }

    #[test]
    fn a_cookie_of_another_service_key_or_name_and_a_forged_one_begin_a_new_session() {
        let api = service("api", "cookie");
        let web = service("web", "cookie");
        let (cookie, hash) = begun(&sessions(1), &api);
        let (name, value) = cookie.split_once('=').unwrap();
        let changed = [0, VALUE / 2, VALUE - 1].map(|at| {
            let other = if value[at..].starts_with('A') {
                "B"
            } else {
                "A"
            };
            format!("{}{other}{}", &value[..at], &value[at + 1..])
        });
        let length = [
            value[..VALUE - 1].to_owned(),
            format!("{value}A"),
            String::new(),
            "!".repeat(VALUE),
        ];
        for forged in changed.into_iter().chain(length) {
            let mut request = request(&[("cookie", &format!("{name}={forged}"))]);
            let session = sessions(1).of(&api, &mut request);
            assert!(
                session.set_cookie.is_some() && session.hash != Some(hash),
                "{forged}"
            );
            assert_eq!(cookie_field(&request), None, "{forged}");
        }
        for (sessions, service) in [(sessions(1), &web), (sessions(2), &api)] {
            let session = sessions.of(service, &mut request(&[("cookie", &cookie)]));
            assert!(session.set_cookie.is_some() && session.hash != Some(hash));
        }
        // Another name is a cookie of the backend.
        let named = service("api", "cookie:sid");
        let mut request = request(&[("cookie", &cookie)]);
        assert!(
            sessions(1)
                .of(&named, &mut request)
                .set_cookie
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("sid=")
        );
        assert_eq!(cookie_field(&request), Some(cookie.as_str()));
    }

    #[test]
    fn the_first_valid_one_of_several_cookies_counts_within_a_bound() {
        let api = service("api", "cookie");
        let (cookie, hash) = begun(&sessions(1), &api);
        let (later, _) = begun(&sessions(1), &api);
        let forged = format!("gw_affinity={}", "A".repeat(VALUE));
        for (number, is_found) in [(VERIFIED_MAX - 1, true), (VERIFIED_MAX, false)] {
            let cookies = [vec![forged.as_str(); number], vec![&cookie, &later]].concat();
            let mut request = request(&[("cookie", &cookies.join("; "))]);
            let session = sessions(1).of(&api, &mut request);
            assert_eq!(
                (session.hash == Some(hash), session.set_cookie.is_none()),
                (is_found, is_found),
                "{number}"
            );
            assert_eq!(cookie_field(&request), None);
        }
    }

    #[test]
    fn a_field_or_the_address_of_the_client_is_the_session() {
        let hash = |affinity: &str, fields: &[(&'static str, &str)]| {
            let mut request = request(fields);
            let session = sessions(1).of(&service("api", affinity), &mut request);
            assert_eq!(
                (session.set_cookie, request.headers.len()),
                (None, fields.len())
            );
            session.hash
        };
        // As `printf one | sha256sum` begins: the same in each version.
        assert_eq!(
            hash("header:x-user", &[("x-user", "one")]),
            Some(0x7692_c3ad_3540_bb80)
        );
        assert_ne!(
            hash("header:x-user", &[("x-user", "two")]),
            hash("header:x-user", &[("x-user", "one")])
        );
        assert_eq!(hash("header:x-user", &[("x-other", "one")]), None);
        assert_eq!(hash("header:x-user", &[("x-user", "")]), None);
        assert_eq!(
            hash(
                "none",
                &[
                    ("x-user", "one"),
                    ("cookie", "gw_affinity=x"),
                    ("x-forwarded-for", "::1")
                ]
            ),
            None
        );

        let client = |forwarded: &str| hash("client", &[("x-forwarded-for", forwarded)]);
        let direct = client("192.0.2.1");
        assert!(direct.is_some() && direct != client("192.0.2.2"));
        assert_eq!(
            client("198.51.100.7, 192.0.2.1"),
            direct,
            "a client may forge earlier elements"
        );
        assert_eq!(
            client("198.51.100.7, 192.0.2.1, 10.0.0.1"),
            direct,
            "behind a trusted proxy"
        );
        assert_eq!(client("2001:db8::1"), client("2001:db8::ffff"), "one /64");
        assert_ne!(client("2001:db8::1"), client("2001:db8:0:1::1"));
        assert_eq!((client("unknown"), hash("client", &[])), (None, None));
    }

    #[test]
    fn the_key_is_not_printed() {
        assert_eq!(format!("{:?}", sessions(1).key), "[secret]");
    }

    proptest! {
        #[test]
        fn other_cookies_stay_byte_for_byte(
            others in prop::collection::vec("[ab_]{1,3}=[!-:<-~]{0,8}|[!-:<-~&&[^=]]{1,4}", 0..6),
            at in any::<prop::sample::Index>(),
            separator in prop::sample::select(vec!["; ", ";", ";  "]),
        ) {
            let api = service("api", "cookie");
            let (cookie, hash) = begun(&sessions(1), &api);
            let mut all = others.clone();
            all.insert(at.index(others.len() + 1), cookie);
            let mut request = request(&[("cookie", &all.join(separator))]);
            prop_assert_eq!(sessions(1).of(&api, &mut request).hash, Some(hash));
            let expected = Some(others.join(separator)).filter(|text| !text.is_empty());
            prop_assert_eq!(cookie_field(&request), expected.as_deref());
        }

        #[test]
        fn fields_without_the_cookie_stay_as_they_are(value in "[ -~]{0,40}") {
            let mut request = request(&[("cookie", &value)]);
            let before = request.headers.clone();
            let session = sessions(1).of(&service("api", "cookie"), &mut request);
            prop_assert!(session.set_cookie.is_some());
            prop_assert_eq!(request.headers, before);
        }
    }
}
