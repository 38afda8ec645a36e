//! Settings of the proxy: the agent's own key and the variables of all programs. Pure, but for the
//! file of the password.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gw_shared::config::Keys;
use gw_shared::files;
use gw_shared::identity::secret::Secret;
use http::uri::Authority;
use percent_encoding::percent_decode_str;
use zeroize::Zeroizing;

use super::exceptions::Exceptions;

/// Variables that name a proxy for connections with TLS, read by many programs; the first one that
/// is set applies.
const PROXY_VARIABLES: [&str; 2] = ["HTTPS_PROXY", "https_proxy"];
/// Variables that list the hosts which no proxy is used for.
const EXCEPTION_VARIABLES: [&str; 2] = ["NO_PROXY", "no_proxy"];

const FORM: &str = "http://USER:PASSWORD@HOST:PORT or http://HOST:PORT";
/// Longest user and longest password, in bytes.
const CREDENTIAL_MAX: usize = 1024;

/// Whether and how connections to the gateway go through a proxy.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProxySettings {
    proxy: Option<Proxy>,
    exceptions: Exceptions,
}

/// An HTTP proxy.
#[derive(Debug, Clone)]
pub(crate) struct Proxy {
    /// Host name or address literal, with brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// Value of `Proxy-Authorization`.
    pub(super) authorization: Option<Secret>,
    /// Key or variable that names the proxy.
    pub(crate) source: String,
}

/// Writes `HOST:PORT`.
impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// User and password of the URL of a proxy.
struct Credentials {
    user: String,
    password: Option<Secret>,
}

impl ProxySettings {
    /// Takes the keys `proxy` and `proxy_password_file`; the variables of all programs apply where
    /// `proxy` is not set.
    pub(crate) fn take(keys: &mut Keys<'_>) -> Self {
        let own = keys.unshown("proxy", FORM);
        let password_file = keys.text("proxy_password_file", "a file", |text| {
            Some(PathBuf::from(text))
        });
        let environment = keys.environment();
        let first = |names: [&'static str; 2]| {
            let set = |name: &'static str| {
                Some((
                    name.to_owned(),
                    environment(name).filter(|text| !text.is_empty())?,
                ))
            };
            names.into_iter().find_map(set)
        };
        if password_file.is_some() && own.is_none() {
            keys.errors
                .push("proxy_password_file: needs `proxy`, which is not set".to_owned());
        }
        let password_file = password_file.filter(|_| own.is_some());
        let exceptions = first(EXCEPTION_VARIABLES)
            .map(|(_, list)| Exceptions::parse(&list))
            .unwrap_or_default();
        let found = own
            .or_else(|| first(PROXY_VARIABLES))
            .filter(|(_, url)| !url.is_empty());
        let Some((source, url)) = found else {
            return Self {
                proxy: None,
                exceptions,
            };
        };
        let proxy = Self::read(&url, password_file.as_deref(), &source);
        let proxy = proxy.map_err(|error| keys.errors.push(error)).ok();
        Self { proxy, exceptions }
    }

    /// Reads the settings of a command without a configuration file. Mistakes name their variable.
    pub(crate) fn of_environment(
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, Vec<String>> {
        let mut keys = Keys::new(toml::Table::new(), environment);
        let settings = Self::take(&mut keys);
        if keys.errors.is_empty() {
            Ok(settings)
        } else {
            Err(keys.errors)
        }
    }

    fn read(url: &str, password_file: Option<&Path>, source: &str) -> Result<Proxy, String> {
        let (host, port, credentials) = parse(url).map_err(|error| format!("{source}: {error}"))?;
        let authorization = match (credentials, password_file) {
            (None, Some(_)) => {
                return Err(format!(
                    "proxy_password_file: {source} names no user; use http://USER@HOST:PORT"
                ));
            }
            (None, None) => None,
            (Some(credentials), file) => {
                let password = file.map(read_password).transpose();
                let password = password.map_err(|error| format!("proxy_password_file: {error}"))?;
                Some(basic(
                    &credentials.user,
                    password.or(credentials.password).as_ref(),
                ))
            }
        };
        Ok(Proxy {
            host,
            port,
            authorization,
            source: source.to_owned(),
        })
    }

    /// The proxy for connections to `host`, a name or an address literal. Proxies of variables that
    /// all programs read are not used for this machine itself.
    pub(crate) fn for_host(&self, host: &str, port: u16) -> Option<&Proxy> {
        let proxy = self.proxy.as_ref()?;
        let is_own = !PROXY_VARIABLES.contains(&proxy.source.as_str());
        (!self.exceptions.contain(host, port) && (is_own || !is_loopback(host))).then_some(proxy)
    }

    /// The proxy, whichever hosts it is used for.
    pub(crate) fn proxy(&self) -> Option<&Proxy> {
        self.proxy.as_ref()
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']).trim_end_matches('.');
    match host.parse::<IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => host
            .rsplit('.')
            .next()
            .is_some_and(|label| label.eq_ignore_ascii_case("localhost")),
    }
}

/// Parses the URL of a proxy. Errors show no part of it, because it may contain a password.
fn parse(url: &str) -> Result<(String, u16, Option<Credentials>), String> {
    let invalid = || format!("not the URL of a proxy; use {FORM}");
    let (scheme, rest) = url.trim().split_once("://").unwrap_or(("http", url.trim()));
    match scheme.to_ascii_lowercase().as_str() {
        "http" => {}
        "https" => {
            return Err(
                "https:// proxies are not supported, because TLS to the gateway would run inside \
                 TLS to the proxy; use an http:// proxy, or an empty `proxy` to connect directly"
                    .to_owned(),
            );
        }
        "socks" | "socks4" | "socks4a" | "socks5" | "socks5h" => {
            return Err(
                "SOCKS proxies are not supported; use an http:// proxy, or an empty `proxy` to \
                 connect directly"
                    .to_owned(),
            );
        }
        _ => return Err(invalid()),
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    // The last `@`: an unencoded one in a password does no harm.
    let (userinfo, authority) = match rest.rsplit_once('@') {
        Some((userinfo, authority)) => (Some(userinfo), authority),
        None => (None, rest),
    };
    let authority: Authority = authority.parse().map_err(|_| invalid())?;
    let host = authority.host();
    // `port()` is also `None` for a port that is not a number up to 65535.
    let port = match authority.port_u16() {
        Some(port) => port,
        None if authority.as_str().len() == host.len() => 80,
        None => return Err(invalid()),
    };
    if host.is_empty() || port == 0 {
        return Err(invalid());
    }
    let credentials = userinfo
        .filter(|userinfo| !userinfo.is_empty())
        .map(credentials)
        .transpose()?;
    Ok((host.to_owned(), port, credentials))
}

/// Decodes `USER` or `USER:PASSWORD` (RFC 3986 §3.2.1).
fn credentials(userinfo: &str) -> Result<Credentials, String> {
    let (user, password) = userinfo
        .split_once(':')
        .map_or((userinfo, None), |(user, password)| (user, Some(password)));
    let user = decode(user).filter(|user| is_valid(user) && !user.contains(':'));
    let password = password.map(|password| decode(password).map(Secret::new));
    match (user, password) {
        (Some(user), None) => Ok(Credentials {
            user,
            password: None,
        }),
        (Some(user), Some(Some(password))) if is_valid(password.reveal()) => Ok(Credentials {
            user,
            password: Some(password),
        }),
        _ => Err(format!(
            "its user or password is not valid: write bytes other than letters and digits as %XX, \
             in UTF-8, without control characters, at most {CREDENTIAL_MAX} bytes each"
        )),
    }
}

/// Decodes `%XX`; `None` if a `%` is not followed by two hexadecimal digits, or the bytes are not
/// UTF-8.
fn decode(text: &str) -> Option<String> {
    let is_escape = |rest: &str| {
        rest.as_bytes()
            .get(..2)
            .is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    };
    let is_well_formed = text.split('%').skip(1).all(is_escape);
    is_well_formed.then(|| {
        percent_decode_str(text)
            .decode_utf8()
            .ok()
            .map(|text| text.into_owned())
    })?
}

/// Basic authentication allows no control characters (RFC 7617 §2).
fn is_valid(credential: &str) -> bool {
    credential.len() <= CREDENTIAL_MAX && !credential.chars().any(char::is_control)
}

/// Reads a password. A line end at its end is left out.
fn read_password(file: &Path) -> Result<Secret, String> {
    let text = Zeroizing::new(files::read_text(file).map_err(|error| error.to_string())?);
    let password = text.strip_suffix('\n').map_or(text.as_str(), |line| {
        line.strip_suffix('\r').unwrap_or(line)
    });
    if password.is_empty() || !is_valid(password) {
        return Err(format!(
            "{}: must contain the password in one line of 1 to {CREDENTIAL_MAX} bytes",
            file.display()
        ));
    }
    Ok(Secret::new(password.to_owned()))
}

/// Value of `Proxy-Authorization` (RFC 7617 §2).
fn basic(user: &str, password: Option<&Secret>) -> Secret {
    let pair = Zeroizing::new(format!("{user}:{}", password.map_or("", Secret::reveal)));
    Secret::new(format!("Basic {}", STANDARD.encode(pair.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads this text of agent.toml with these variables.
    fn settings(text: &str, variables: &[(&str, &str)]) -> Result<ProxySettings, Vec<String>> {
        let environment = |name: &str| {
            let found = variables.iter().find(|(set, _)| *set == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let mut keys = Keys::new(text.parse().unwrap(), &environment);
        let settings = ProxySettings::take(&mut keys);
        keys.refuse_unknown();
        if keys.errors.is_empty() {
            Ok(settings)
        } else {
            Err(keys.errors)
        }
    }

    fn proxy_for(text: &str, variables: &[(&str, &str)], host: &str) -> Option<String> {
        let settings = settings(text, variables).unwrap();
        settings.for_host(host, 443).map(Proxy::to_string)
    }

    fn authorization(settings: ProxySettings) -> String {
        let authorization = settings.proxy.unwrap().authorization;
        authorization.unwrap().reveal().to_owned()
    }

    #[test]
    fn nearest_setting_applies() {
        const HOST: &str = "eu1.example.com";
        let all = [
            ("HTTPS_PROXY", "http://upper:1"),
            ("https_proxy", "http://lower:2"),
            ("GW_PROXY", "http://own:3"),
        ];
        let file = "proxy = 'http://file:4'";
        for (text, variables, expected) in [
            ("", &[][..], None),
            (file, &all, Some("own:3")),
            (file, &all[..2], Some("file:4")),
            ("", &all[..2], Some("upper:1")),
            ("", &[("HTTPS_PROXY", ""), all[1]], Some("lower:2")),
            // An empty setting of the agent's own means no proxy.
            ("proxy = ''", &all[..2], None),
            (file, &[("GW_PROXY", ""), all[0]], None),
        ] {
            let proxy = proxy_for(text, variables, HOST);
            assert_eq!(proxy.as_deref(), expected, "{text} {variables:?}");
        }
    }

    #[test]
    fn exceptions_apply_to_every_proxy_and_loopback_to_those_of_all_programs() {
        const OWN: &str = "proxy = 'http://p'";
        let no_proxy = ("no_proxy", "example.com");
        let proxy = |variables: &[(&str, &str)]| proxy_for(OWN, variables, "eu1.example.com");
        assert_eq!(proxy(&[no_proxy]), None);
        assert_eq!(proxy(&[("NO_PROXY", "a.org"), no_proxy]).unwrap(), "p:80");
        for host in ["eu1.gw.localhost", "127.0.0.1", "[::1]"] {
            let of_all = proxy_for("", &[("HTTPS_PROXY", "http://p")], host);
            assert_eq!(of_all, None, "{host}");
            assert_eq!(proxy_for(OWN, &[], host).unwrap(), "p:80", "{host}");
        }
    }

    #[test]
    fn urls_have_optional_scheme_port_and_credentials() {
        for (url, proxy) in [
            ("http://proxy.example.com:3128", "proxy.example.com:3128"),
            ("HTTP://proxy/", "proxy:80"),
            ("proxy:8080", "proxy:8080"),
            ("http://u:p@[::1]:3128", "[::1]:3128"),
        ] {
            let found = proxy_for(&format!("proxy = '{url}'"), &[], "h");
            assert_eq!(found.unwrap(), proxy);
        }
    }

    #[test]
    fn credentials_of_urls_are_sent_as_basic_authentication() {
        for (userinfo, expected) in [
            // base64("user:p@ss:word"), as in RFC 7617 with the first `:` between user and
            // password.
            ("user:p%40ss:word", "Basic dXNlcjpwQHNzOndvcmQ="),
            ("user", "Basic dXNlcjo="),
            ("%C3%BC:", "Basic w7w6"),
        ] {
            let settings = settings(&format!("proxy = 'http://{userinfo}@h'"), &[]);
            assert_eq!(authorization(settings.unwrap()), expected);
        }
    }

    #[test]
    fn mistakes_name_their_source_and_never_show_the_url() {
        for (url, cause) in [
            (
                "https://u:hunter2@h:1",
                "https:// proxies are not supported",
            ),
            ("socks5://u:hunter2@h:1", "SOCKS proxies are not supported"),
            ("ftp://u:hunter2@h:1", "not the URL of a proxy"),
            ("http://u:hunter2@h:99999", "not the URL of a proxy"),
            ("http://u:hunter2@h:0", "not the URL of a proxy"),
            ("http://u:hunter2@", "not the URL of a proxy"),
            ("http://u:hunter2@h/path", "not the URL of a proxy"),
            ("http://u:hunter2%@h", "user or password is not valid"),
            ("http://u:hunter2%0a@h", "user or password is not valid"),
            ("http://u%3a:hunter2@h", "user or password is not valid"),
            ("http://u:hunter2%ff@h", "user or password is not valid"),
        ] {
            for (text, variables, source) in [
                (format!("proxy = '{url}'"), vec![], "proxy: "),
                (String::new(), vec![("GW_PROXY", url)], "GW_PROXY: "),
                (String::new(), vec![("HTTPS_PROXY", url)], "HTTPS_PROXY: "),
            ] {
                let errors = settings(&text, &variables).unwrap_err();
                let is_told =
                    errors.len() == 1 && errors[0].starts_with(source) && errors[0].contains(cause);
                assert!(
                    is_told && !errors[0].contains("hunter2"),
                    "{url}: {errors:?}"
                );
            }
        }
        let errors = settings("proxy = ['http://u:hunter2@h']", &[]).unwrap_err();
        assert!(
            errors[0].starts_with("proxy: ") && !errors[0].contains("hunter2"),
            "{errors:?}"
        );
    }

    #[test]
    fn the_debug_form_has_no_password() {
        let settings = settings("proxy = 'http://u:hunter2@h'", &[]).unwrap();
        let printed = format!("{settings:?}");
        for secret in ["hunter2", &STANDARD.encode("u:hunter2")] {
            assert!(!printed.contains(secret), "{printed}");
        }
    }

    #[test]
    fn password_can_be_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        let with = |contents: &str, url: &str| {
            std::fs::write(&file, contents).unwrap();
            let file = file.display();
            let text = format!("proxy = '{url}'\nproxy_password_file = '{file}'");
            settings(&text, &[]).map(authorization)
        };
        let expected = Ok("Basic dXNlcjpwQHNzOndvcmQ=".to_owned());
        assert_eq!(with("p@ss:word\n", "http://user:other@h"), expected);
        assert_eq!(with("p@ss:word\r\n", "http://user@h"), expected);
        for wrong in ["", "\n", "two\nlines\n"] {
            let errors = with(wrong, "http://user@h").unwrap_err();
            assert!(
                errors[0].starts_with("proxy_password_file: ") && errors[0].contains("one line"),
                "{errors:?}"
            );
        }
        assert!(with("x", "http://h").unwrap_err()[0].contains("names no user"));
        for text in [
            "proxy_password_file = '/none'",
            "proxy_password_file = '/none'\nproxy = 'http://u@h'",
        ] {
            let errors = settings(text, &[]).unwrap_err();
            assert!(errors[0].starts_with("proxy_password_file: "), "{text}");
        }
    }
}
