//! The configuration file: read, checked as a whole, every mistake reported at once with its key.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use gw_shared::logging::LogFormat;

use crate::hostname::Region;
use crate::limit::Rate;
use crate::limits;
use crate::tls::{self, CertificateSource};

/// Everything a gateway needs to know to start; valid by construction.
#[derive(Debug, Clone)]
pub struct Config {
    pub region: Region,
    pub data_dir: PathBuf,
    pub listen: SocketAddr,
    pub admin_listen: SocketAddr,
    /// At least 1.
    pub workers: usize,
    pub certificate: CertificateSource,
    pub hand_over: HandOver,
    /// Of services that do not set their own.
    pub default_rate: Rate,
    pub drain: Duration,
    pub log_format: LogFormat,
}

/// When a connection is given to the worker that owns its service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOver {
    /// Unless that worker is clearly the busier.
    Auto,
    Always,
    /// Requests then cross one by one.
    Never,
}

/// All that is wrong with a configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigErrors(Vec<String>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "configuration:")?;
        self.0.iter().try_for_each(|error| write!(f, "\n  {error}"))
    }
}

impl std::error::Error for ConfigErrors {}

/// Bucket of a service by default: burst of 1000, 300 per minute.
const DEFAULT_BURST: i64 = 1000;
const DEFAULT_REFILL_PER_MINUTE: i64 = 300;
const WORKERS_MAX: i64 = 1024;

impl Config {
    /// Reads TOML `text`; every key can be overridden by the variable `GW_` + its name in capitals.
    pub fn parse(text: &str, environment: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigErrors> {
        let table = text.parse::<toml::Table>().map_err(|error| ConfigErrors(vec![error.to_string()]))?;
        let mut keys = Keys { table, environment: &environment, errors: Vec::new() };

        let region = keys.required("region", "a label such as \"eu1\"", parse_label);
        let domain = keys.required("domain", "a domain such as \"example.com\"", parse_domain);
        let data_dir = keys.required("data_dir", "a folder", |text| Some(PathBuf::from(text)));
        let listen = keys.optional("listen", "ADDRESS:PORT", |text| text.parse().ok());
        let admin_listen = keys.optional("admin_listen", "ADDRESS:PORT", |text| text.parse().ok());
        let certificate = keys.optional("tls_certificate", "a file", |text| Some(PathBuf::from(text)));
        let key = keys.optional("tls_key", "a file", |text| Some(PathBuf::from(text)));
        let hand_over = keys.optional("hand_over", "\"auto\", \"always\" or \"never\"", parse_hand_over);
        let log_format = keys.optional("log_format", "\"text\" or \"json\"", |text| text.parse().ok());
        let workers = keys.integer("workers", 0, 0..=WORKERS_MAX);
        let burst = keys.integer("burst", DEFAULT_BURST, 1..=i64::from(u32::MAX));
        let refill = keys.integer("refill_per_minute", DEFAULT_REFILL_PER_MINUTE, 1..=i64::from(u32::MAX));
        let drain = keys.integer("drain_seconds", limits::DRAIN.as_secs().cast_signed(), 0..=86_400);
        if certificate.is_some() != key.is_some() {
            keys.errors.push("tls_certificate, tls_key: give both or neither".to_owned());
        }
        keys.refuse_unknown();

        let (Some(region), Some(domain), Some(data_dir), true) = (region, domain, data_dir, keys.errors.is_empty())
        else {
            return Err(ConfigErrors(keys.errors));
        };
        let certificate = match (certificate, key) {
            (Some(certificate), Some(key)) => CertificateSource::Files { certificate, key },
            _ => CertificateSource::Development { data_dir: data_dir.clone() },
        };
        Ok(Self {
            region: Region::new(&region, &domain),
            data_dir,
            listen: listen.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 443))),
            admin_listen: admin_listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 9080))),
            workers: workers_or_cores(usize::try_from(workers).unwrap_or(0)),
            certificate,
            hand_over: hand_over.unwrap_or(HandOver::Auto),
            default_rate: rate(burst, refill),
            drain: Duration::from_secs(drain.unsigned_abs()),
            log_format: log_format.unwrap_or_default(),
        })
    }
}

impl Config {
    /// Reads the files that the configuration names, as a start would.
    pub fn check_files(&self) -> Result<(), ConfigErrors> {
        let CertificateSource::Files { certificate, key } = &self.certificate else { return Ok(()) };
        let errors: Vec<String> = [
            tls::read_chain(certificate).err().map(|error| format!("tls_certificate: {error}")),
            tls::read_key(key).err().map(|error| format!("tls_key: {error}")),
        ]
        .into_iter()
        .flatten()
        .collect();
        if errors.is_empty() { Ok(()) } else { Err(ConfigErrors(errors)) }
    }
}

/// `workers` as asked for; 0 means one for each core this process may run on.
pub fn workers_or_cores(workers: usize) -> usize {
    if workers > 0 { workers } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Both were checked to be positive and to fit.
fn rate(burst: i64, refill: i64) -> Rate {
    let positive = |value: i64| u32::try_from(value).unwrap_or(u32::MAX).max(1);
    let fallback = const {
        match Rate::new(1, 1) {
            Some(rate) => rate,
            None => panic!("one is not zero"),
        }
    };
    Rate::new(positive(burst), positive(refill)).unwrap_or(fallback)
}

fn parse_label(text: &str) -> Option<String> {
    let valid = !text.is_empty()
        && text.len() <= 63
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    valid.then(|| text.to_owned())
}

fn parse_domain(text: &str) -> Option<String> {
    (text.len() <= 180 && text.split('.').all(|label| parse_label(label).is_some())).then(|| text.to_owned())
}

fn parse_hand_over(text: &str) -> Option<HandOver> {
    match text {
        "auto" => Some(HandOver::Auto),
        "always" => Some(HandOver::Always),
        "never" => Some(HandOver::Never),
        _ => None,
    }
}

/// Takes keys out of a table one by one and collects what is wrong with them.
struct Keys<'a> {
    table: toml::Table,
    environment: &'a dyn Fn(&str) -> Option<String>,
    errors: Vec<String>,
}

impl Keys<'_> {
    fn required<T>(&mut self, key: &str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let had_errors = self.errors.len();
        let value = self.optional(key, expected, parse);
        if value.is_none() && self.errors.len() == had_errors {
            self.errors.push(format!("{key}: missing; it must be {expected}"));
        }
        value
    }

    fn optional<T>(&mut self, key: &str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (name, value) = self.take(key)?;
        let parsed = value.as_str().and_then(&parse);
        if parsed.is_none() {
            self.errors.push(format!("{name}: {value} is not {expected}"));
        }
        parsed
    }

    fn integer(&mut self, key: &str, default: i64, range: std::ops::RangeInclusive<i64>) -> i64 {
        let Some((name, value)) = self.take(key) else { return default };
        let number = value.as_integer().or_else(|| value.as_str()?.parse().ok());
        match number.filter(|number| range.contains(number)) {
            Some(number) => number,
            None => {
                let (from, to) = range.into_inner();
                self.errors.push(format!("{name}: {value} is not a whole number from {from} to {to}"));
                default
            }
        }
    }

    /// The value in force, with the name under which it was given.
    fn take(&mut self, key: &str) -> Option<(String, toml::Value)> {
        let in_file = self.table.remove(key);
        let variable = format!("GW_{}", key.to_ascii_uppercase());
        match (self.environment)(&variable) {
            Some(text) => Some((variable, toml::Value::String(text))),
            None => in_file.map(|value| (key.to_owned(), value)),
        }
    }

    fn refuse_unknown(&mut self) {
        let unknown: Vec<String> = self.table.keys().map(|key| format!("{key}: no such key")).collect();
        self.errors.extend(unknown);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "region = \"eu1\"\ndomain = \"example.com\"\ndata_dir = \"/var/lib/gw\"\n";

    fn parse(text: &str) -> Result<Config, ConfigErrors> {
        Config::parse(text, |_| None)
    }

    #[test]
    fn the_minimum_has_defaults() {
        let config = parse(MINIMAL).unwrap();
        assert_eq!(config.region.apex(), "eu1.example.com");
        assert_eq!(config.listen.port(), 443);
        assert!(config.admin_listen.ip().is_loopback());
        assert_eq!((config.default_rate.burst(), config.default_rate.refill_per_minute()), (1000, 300));
        assert!(config.workers >= 1);
        assert_eq!(config.hand_over, HandOver::Auto);
    }

    #[test]
    fn every_mistake_is_reported_at_once_by_its_key() {
        let text = "region = \"EU\"\ndata_dir = 5\nworkers = -1\nburst = \"many\"\nlisten = \"443\"\n\
                    hand_over = \"often\"\ntls_key = \"k\"\ncolour = 1\n";
        let errors = parse(text).unwrap_err().0;
        let keys: Vec<&str> = errors.iter().map(|error| error.split(':').next().unwrap()).collect();
        assert_eq!(
            keys,
            [
                "region",
                "domain",
                "data_dir",
                "listen",
                "hand_over",
                "workers",
                "burst",
                "tls_certificate, tls_key",
                "colour",
            ]
        );
        assert_eq!(errors[5], "workers: -1 is not a whole number from 0 to 1024");
    }

    #[test]
    fn variables_override_the_file_and_are_named_when_wrong() {
        let environment = |name: &str| match name {
            "GW_REGION" => Some("us2".to_owned()),
            "GW_WORKERS" => Some("3".to_owned()),
            _ => None,
        };
        let config = Config::parse(MINIMAL, environment).unwrap();
        assert_eq!((config.region.apex(), config.workers), ("us2.example.com", 3));
        let wrong = Config::parse(MINIMAL, |name| (name == "GW_WORKERS").then(|| "x".to_owned())).unwrap_err();
        assert!(wrong.0[0].starts_with("GW_WORKERS: "), "{wrong}");
    }

    #[test]
    fn broken_toml_is_shown_where_it_breaks() {
        assert!(parse("region = ").unwrap_err().to_string().contains("line 1"));
    }
}
