//! Settings of tracing: keys of the configuration, with OpenTelemetry's variables as defaults.

use std::fmt;

use http::Uri;

use crate::config::Keys;

/// Default share of recorded traces.
const DEFAULT_RATIO: f64 = 0.01;

/// Path of OTLP/HTTP below the collector's base URL.
const PATH: &str = "/v1/traces";

const ENDPOINT_FORM: &str = "the URL of an OTLP/HTTP collector, such as \"http://127.0.0.1:4318\"";
const RATIO_FORM: &str = "a number from 0 to 1";

/// Settings of a program with a collector.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectorSettings {
    pub endpoint: CollectorUrl,
    /// Share of recorded traces, 0 to 1, among those that begin here. For others their creator
    /// decides.
    pub sample_ratio: f64,
}

/// URL that spans are posted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorUrl(String);

/// Setting of the collector in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Collector {
    /// No collector, regardless of OpenTelemetry's variables.
    Nowhere,
    At(CollectorUrl),
}

impl Collector {
    /// Parses a setting: the collector's base URL, or empty text for no collector.
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            Some(Self::Nowhere)
        } else {
            CollectorUrl::below(text).map(Self::At)
        }
    }
}

impl CollectorUrl {
    /// Makes `{base}/v1/traces`; a base that ends in this path stays as it is.
    pub fn below(base: &str) -> Option<Self> {
        let base = base.trim_end_matches('/');
        let url = if base.ends_with(PATH) {
            base.to_owned()
        } else {
            format!("{base}{PATH}")
        };
        Self::exactly(&url)
    }

    /// Parses the whole URL.
    pub fn exactly(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let authority = uri.authority()?;
        let has_port = authority.as_str().len() > authority.host().len();
        // No credentials: the URL is logged.
        let valid = matches!(uri.scheme_str(), Some("http" | "https"))
            && !authority.host().is_empty()
            && !authority.as_str().contains('@')
            && (authority.port_u16().is_some() || !has_port)
            && uri.query().is_none();
        valid.then(|| Self(uri.to_string()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl CollectorSettings {
    /// Parses a share of traces, 0 to 1.
    pub fn parse_ratio(text: &str) -> Option<f64> {
        text.parse()
            .ok()
            .filter(|ratio| (0.0..=1.0).contains(ratio))
    }

    /// Takes the keys `traces.endpoint` and `traces.sample_ratio`; OpenTelemetry's variables apply
    /// where they are not set. `None` without a collector.
    pub fn take(keys: &mut Keys<'_>) -> Option<Self> {
        keys.open_table("traces");
        let collector = keys.text("traces.endpoint", ENDPOINT_FORM, Collector::parse);
        let sample_ratio = keys.number("traces.sample_ratio", RATIO_FORM, Self::parse_ratio);
        let environment = keys.environment();
        Self::resolve(collector, sample_ratio, environment, &mut keys.errors)
    }

    /// Completes the settings of a configuration by OpenTelemetry's variables. `None` without a
    /// collector. Mistakes in variables go to `errors`; an empty variable counts as unset.
    pub fn resolve(
        collector: Option<Collector>,
        sample_ratio: Option<f64>,
        environment: &dyn Fn(&str) -> Option<String>,
        errors: &mut Vec<String>,
    ) -> Option<Self> {
        let mut variables = Variables {
            environment,
            errors,
        };
        let endpoint = match collector {
            Some(Collector::Nowhere) => return None,
            Some(Collector::At(endpoint)) => endpoint,
            None => variables
                .read(
                    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                    ENDPOINT_FORM,
                    CollectorUrl::exactly,
                )
                .or_else(|| {
                    variables.read(
                        "OTEL_EXPORTER_OTLP_ENDPOINT",
                        ENDPOINT_FORM,
                        CollectorUrl::below,
                    )
                })?,
        };
        let sample_ratio = sample_ratio
            .or_else(|| variables.read("OTEL_TRACES_SAMPLER_ARG", RATIO_FORM, Self::parse_ratio));
        Some(Self {
            endpoint,
            sample_ratio: sample_ratio.unwrap_or(DEFAULT_RATIO),
        })
    }
}

/// OpenTelemetry's variables, and the mistakes in them.
struct Variables<'a> {
    environment: &'a dyn Fn(&str) -> Option<String>,
    errors: &'a mut Vec<String>,
}

impl Variables<'_> {
    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let text = (self.environment)(name).filter(|text| !text.is_empty())?;
        let parsed = parse(&text);
        if parsed.is_none() {
            self.errors
                .push(format!("{name}: {text:?} is not {expected}"));
        }
        parsed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(
        collector: Option<&str>,
        ratio: Option<f64>,
        variables: &[(&str, &str)],
    ) -> Result<Option<(String, f64)>, Vec<String>> {
        let mut errors = Vec::new();
        let environment = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let collector = collector.map(|text| Collector::parse(text).unwrap());
        let settings = CollectorSettings::resolve(collector, ratio, &environment, &mut errors);
        let settings =
            settings.map(|settings| (settings.endpoint.to_string(), settings.sample_ratio));
        if errors.is_empty() {
            Ok(settings)
        } else {
            Err(errors)
        }
    }

    #[test]
    fn the_configuration_overrides_opentelemetrys_variables() {
        const VARIABLES: [(&str, &str); 3] = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://all.example/otlp/"),
            (
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                "https://traces.example/here",
            ),
            ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
        ];
        let of_file = "http://c:4318/v1/traces";
        let of_all = "https://all.example/otlp/v1/traces";
        let empty = [
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""),
            VARIABLES[0],
            ("OTEL_TRACES_SAMPLER_ARG", ""),
        ];
        for (collector, ratio, variables, expected) in [
            (None, None, &[][..], None),
            (None, Some(1.0), &[], None),
            (
                Some("http://c:4318"),
                None,
                &[],
                Some((of_file, DEFAULT_RATIO)),
            ),
            (Some(of_file), Some(1.0), &VARIABLES, Some((of_file, 1.0))),
            (
                None,
                None,
                &VARIABLES,
                Some(("https://traces.example/here", 0.5)),
            ),
            (None, None, &VARIABLES[..1], Some((of_all, DEFAULT_RATIO))),
            (Some(""), None, &VARIABLES, None),
            (None, None, &empty, Some((of_all, DEFAULT_RATIO))),
        ] {
            let expected = expected.map(|(url, ratio)| (url.to_owned(), ratio));
            let resolved = resolve(collector, ratio, variables);
            assert_eq!(resolved, Ok(expected), "{collector:?} {variables:?}");
        }
    }

    #[test]
    fn mistakes_name_their_variable() {
        for bad in [
            "c:4318",
            "ftp://c",
            "http://",
            "/v1",
            "http://c?x=1",
            "http://user:secret@c",
            "http://c:port",
        ] {
            assert_eq!(Collector::parse(bad), None, "{bad}");
        }
        for bad in ["-0.1", "1.1", "NaN", "a tenth", "1%"] {
            assert_eq!(CollectorSettings::parse_ratio(bad), None, "{bad}");
        }
        let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")];
        let errors = resolve(None, None, &variables).unwrap_err();
        let expected = "OTEL_EXPORTER_OTLP_ENDPOINT: \"collector:4318\" is not the URL";
        assert!(errors[0].starts_with(expected), "{errors:?}");
        let variables = [("OTEL_TRACES_SAMPLER_ARG", "2")];
        let errors = resolve(Some("http://c"), None, &variables).unwrap_err();
        let expected = "OTEL_TRACES_SAMPLER_ARG: \"2\" is not a number from 0 to 1";
        assert_eq!(errors, [expected]);
    }

    #[test]
    fn keys_of_the_file_are_overridden_by_their_variables() {
        let environment =
            |name: &str| (name == "GW_TRACES_ENDPOINT").then(|| "http://variable".to_owned());
        let text = "[traces]\nendpoint = 'http://file'\nsample_ratio = 1\n";
        let mut keys = Keys::parse(text, &environment).unwrap();
        let settings = CollectorSettings::take(&mut keys).unwrap();
        keys.refuse_unknown();
        assert_eq!(
            (settings.endpoint.as_str(), settings.sample_ratio),
            ("http://variable/v1/traces", 1.0)
        );
        assert!(keys.errors.is_empty(), "{:?}", keys.errors);
    }
}
