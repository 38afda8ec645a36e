use gw_region::RegionKey;

use super::*;

const MINIMAL: &str = "region = \"eu1\"\ndomain = \"example.com\"\ndata_dir = \"/var/lib/gw\"\n";

fn parse(text: &str) -> Result<Config, ConfigErrors> {
    Config::parse(text, |_| None)
}

#[test]
fn a_minimal_configuration_has_defaults() {
    let config = parse(MINIMAL).unwrap();
    assert_eq!(config.region.apex(), "eu1.example.com");
    assert_eq!((config.listen.port(), config.listen_http), (443, None));
    assert!(config.admin_listen.ip().is_loopback());
    assert_eq!(
        (
            config.default_rate.burst(),
            config.default_rate.refill_per_minute()
        ),
        (1000, 300)
    );
    assert!(config.workers >= 1);
    assert_eq!(config.hand_over, HandOver::Auto);
    assert_eq!(config.trusted_proxies, TrustedProxies::default());
    assert_eq!(config.token_requests, Rate::new(60, 60).unwrap());
    assert_eq!(config.enrollment_requests, Rate::new(60, 60).unwrap());
    assert_eq!(config.auth_failures, Rate::new(600, 600).unwrap());
    assert_eq!(config.new_connections, Rate::new(60_000, 60_000).unwrap());
    assert_eq!(config.connections_per_address, 16_384);
    assert!(config.agent_mtls);
    assert_eq!(
        config.agent_certificate_lifetime,
        Duration::from_secs(86_400)
    );
    assert_eq!(config.token_lifetime, Duration::from_secs(3600));
    assert_eq!(
        config.signing_key_rotation,
        Some(Duration::from_secs(30 * 86_400))
    );
    assert_eq!(
        (config.drain, config.log_format),
        (Duration::from_secs(30), LogFormat::Text)
    );
    assert!(!config.core_dumps);
    assert_eq!(config.tls_min_version, OldestTls::Tls12);
    assert!(config.relay_memory > 0);
    assert_eq!((config.traces, config.access_log), (None, None));
}

#[test]
fn the_seal_key_is_a_credential_by_default_and_only_for_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let parse = |text: &str| {
        let credentials = folder.path().to_str().unwrap().to_owned();
        Config::parse(&format!("{MINIMAL}{text}"), |name| {
            (name == "CREDENTIALS_DIRECTORY").then(|| credentials.clone())
        })
    };
    assert_eq!(parse("").unwrap().seal_key, None);
    std::fs::write(folder.path().join("seal-key"), "").unwrap();
    assert_eq!(
        parse("").unwrap().seal_key,
        Some(folder.path().join("seal-key"))
    );
    assert_eq!(
        parse("seal_key = \"s\"\n").unwrap().seal_key,
        Some(PathBuf::from("s"))
    );
    let postgres = "store = \"postgres://gw@localhost/gw\"\nregion_key = \"k\"\n";
    assert_eq!(parse(postgres).unwrap().seal_key, None);
    let refused = parse(&format!("{postgres}seal_key = \"s\"\n")).unwrap_err();
    assert!(
        refused.0[0].starts_with("seal_key: only for SQLite"),
        "{refused}"
    );
}

#[test]
fn the_access_log_is_off_on_standard_output_or_a_file() {
    let access_log = |value: &str| {
        parse(&format!("{MINIMAL}access_log = \"{value}\"\n")).map(|config| config.access_log)
    };
    assert_eq!(access_log("off"), Ok(None));
    assert_eq!(
        access_log("/var/log/a.jsonl"),
        Ok(Some(AccessLogTarget::File("/var/log/a.jsonl".into())))
    );
    for value in ["stdoutt", "a.jsonl", ""] {
        assert!(
            access_log(value).unwrap_err().0[0].starts_with("access_log: "),
            "{value}"
        );
    }
}

#[test]
fn all_keys_are_parsed() {
    let given = "listen = \"[::1]:8443\"\nlisten_http = \"[::1]:8080\"\n\
                 admin_listen = \"127.0.0.1:1\"\nadmin_hosts = [\"a.example\"]\n\
                 tls_certificate = \"c\"\ntls_key = \"k\"\ntls_min_version = \"1.3\"\n\
                 admin_tls_certificate = \"ac\"\nadmin_tls_key = \"ak\"\nhand_over = \"never\"\n\
                 log_format = \"json\"\ncore_dumps = true\nworkers = 5\nburst = 7\n\
                 refill_per_minute = 8\n\
                 trusted_proxies = [\"10.0.0.0/8\", \"192.0.2.1\", \"2001:db8::/32\", \
                 \"fd00::1\"]\ntoken_requests_per_minute = 1\nenrollment_requests_per_minute = 2\n\
                 auth_failures_per_minute = 1000000\nnew_connections_per_minute = 3\n\
                 connections_per_address = 4\nagent_mtls = false\nagent_certificate_hours = 2\n\
                 token_lifetime_seconds = 60\nsigning_key_days = 0\ndrain_seconds = 0\n\
                 relay_memory_mib = 16\nrequest_log_max_bytes = 67108864\naccess_log = \"stdout\"\n\
                 [traces]\nendpoint = \"https://c:4318\"\nsample_ratio = 1\n";
    let config = parse(&format!("{MINIMAL}seal_key = \"s\"\n{given}")).unwrap();
    assert_eq!(config.seal_key, Some(PathBuf::from("s")));
    assert_eq!(config.listen.port(), 8443);
    assert_eq!((config.admin_listen.port(), config.workers), (1, 5));
    assert_eq!(config.listen_http.unwrap().port(), 8080);
    assert_eq!(config.admin_hosts, ["a.example"]);
    let CertificateSource::Files { certificate, key } = config.certificate else {
        panic!()
    };
    assert_eq!((certificate, key), (PathBuf::from("c"), PathBuf::from("k")));
    assert_eq!(config.tls_min_version, OldestTls::Tls13);
    let admin = CertificateFiles {
        certificate: "ac".into(),
        key: "ak".into(),
    };
    assert_eq!(config.admin_certificate, Some(admin));
    assert_eq!(config.hand_over, HandOver::Never);
    assert_eq!(config.log_format, LogFormat::Json);
    assert_eq!(config.default_rate, Rate::new(7, 8).unwrap());
    let blocks = ["10.0.0.0/8", "192.0.2.1/32", "2001:db8::/32", "fd00::1/128"];
    assert_eq!(
        config.trusted_proxies,
        proxies(&blocks.map(|block| (block, ProxyProtocol::Guessed)))
    );
    assert_eq!(config.token_requests, Rate::new(1, 1).unwrap());
    assert_eq!(config.enrollment_requests, Rate::new(2, 2).unwrap());
    assert_eq!(
        config.auth_failures,
        Rate::new(1_000_000, 1_000_000).unwrap()
    );
    assert_eq!(
        (config.new_connections, config.connections_per_address),
        (Rate::new(3, 3).unwrap(), 4)
    );
    assert!(!config.agent_mtls && config.core_dumps);
    assert_eq!(config.agent_certificate_lifetime, Duration::from_secs(7200));
    assert_eq!(
        (config.token_lifetime, config.signing_key_rotation),
        (Duration::from_secs(60), None)
    );
    assert_eq!(
        (config.drain, config.relay_memory),
        (Duration::ZERO, 16 * 1024 * 1024)
    );
    assert_eq!(config.access_log, Some(AccessLogTarget::Stdout));
    let traces = config.traces.unwrap();
    assert_eq!(
        (traces.endpoint.as_str(), traces.sample_ratio),
        ("https://c:4318/v1/traces", 1.0)
    );
}

#[test]
fn all_mistakes_are_reported_with_their_keys() {
    let text = "region = \"EU\"\ndata_dir = 5\nworkers = -1\nburst = \"many\"\nlisten = \"443\"\n\
                hand_over = \"often\"\nadmin_hosts = [\"a b\"]\ntls_key = \"k\"\n\
                tls_min_version = \"1.1\"\nadmin_tls_key = \"k\"\ncolour = 1\n\
                agent_mtls = \"yes\"\n\
                trusted_proxies = [\"10.0.0.0/8\", \"10.0.0.0/40\", 7, \"proxy.example.com\"]\n\
                token_requests_per_minute = 0\nenrollment_requests_per_minute = 1000001\n\
                auth_failures_per_minute = 4294967297\nconnections_per_address = 0\n\
                agent_certificate_hours = 721\ntoken_lifetime_seconds = 59\nsigning_key_days = -1\n\
                [traces]\nendpoint = \"c:4318\"\nsample_ratio = 1.5\ncolour = 1\n";
    let errors = parse(text).unwrap_err().0;
    let keys: Vec<&str> = errors
        .iter()
        .map(|error| error.split(':').next().unwrap())
        .collect();
    assert_eq!(
        keys,
        [
            "region",
            "domain",
            "data_dir",
            "listen",
            "admin_hosts",
            "tls_certificate",
            "tls_min_version",
            "admin_tls_certificate",
            "hand_over",
            "trusted_proxies",
            "trusted_proxies",
            "trusted_proxies",
            "workers",
            "burst",
            "token_requests_per_minute",
            "enrollment_requests_per_minute",
            "auth_failures_per_minute",
            "connections_per_address",
            "agent_mtls",
            "agent_certificate_hours",
            "token_lifetime_seconds",
            "signing_key_days",
            "traces.endpoint",
            "traces.sample_ratio",
            "colour",
            "traces.colour",
        ]
    );
    let expected = [
        "trusted_proxies: \"10.0.0.0/40\" is not an address or a block such as \"10.0.0.0/8\"",
        "trusted_proxies: 7 is not an address or a block such as \"10.0.0.0/8\"",
        "trusted_proxies: \"proxy.example.com\" is not an address or a block such as \
         \"10.0.0.0/8\"",
        "workers: -1 is not a whole number from 0 to 1024",
    ];
    assert_eq!(errors[9..13], expected);
    assert_eq!(
        errors[6],
        "tls_min_version: \"1.1\" is not \"1.2\" or \"1.3\""
    );
    assert!(errors.contains(&"agent_mtls: \"yes\" is not true or false".to_owned()));
}

#[test]
fn environment_variables_override_the_file_and_are_named_in_errors() {
    let environment = |name: &str| match name {
        "GW_REGION" => Some("us2".to_owned()),
        "GW_WORKERS" => Some("3".to_owned()),
        "GW_AGENT_MTLS" => Some("false".to_owned()),
        "GW_TRUSTED_PROXIES" => {
            Some("10.0.0.0/8, 10.1.0.0/16=required, 192.0.2.1 = off,".to_owned())
        }
        "GW_TRACES_ENDPOINT" => Some("http://c:1".to_owned()),
        "GW_TRACES_SAMPLE_RATIO" => Some("0.5".to_owned()),
        _ => None,
    };
    let config = Config::parse(
        &format!("{MINIMAL}trusted_proxies = [\"fd00::1\"]\n"),
        environment,
    )
    .unwrap();
    assert_eq!(
        (config.region.apex(), config.workers, config.agent_mtls),
        ("us2.example.com", 3, false)
    );
    let declared = [
        ("10.0.0.0/8", ProxyProtocol::Guessed),
        ("10.1.0.0/16", ProxyProtocol::Required),
        ("192.0.2.1/32", ProxyProtocol::Off),
    ];
    assert_eq!(config.trusted_proxies, proxies(&declared));
    let traces = config.traces.unwrap();
    assert_eq!(
        (traces.endpoint.as_str(), traces.sample_ratio),
        ("http://c:1/v1/traces", 0.5)
    );
    let empty = Config::parse(MINIMAL, |name| {
        (name == "GW_TRUSTED_PROXIES").then(String::new)
    })
    .unwrap();
    assert_eq!(empty.trusted_proxies, TrustedProxies::default());
    let wrong = Config::parse(MINIMAL, |name| {
        (name == "GW_WORKERS").then(|| "x".to_owned())
    })
    .unwrap_err();
    assert!(wrong.0[0].starts_with("GW_WORKERS: "), "{wrong}");
}

fn proxies(blocks: &[(&str, ProxyProtocol)]) -> TrustedProxies {
    blocks
        .iter()
        .map(|(block, setting)| (block.parse().unwrap(), *setting))
        .collect()
}

#[test]
fn proxies_are_strings_or_tables_and_the_most_specific_block_applies() {
    use ProxyProtocol::{Guessed, Off, Required};
    let inline = "trusted_proxies = [\"10.0.0.0/8\", { address = \"10.0.0.7\", proxy_protocol = \
                  \"off\" }, { address = \"10.0.0.0/24\", proxy_protocol = \"required\" }, \
                  \"::ffff:192.0.2.0/120=required\"]\n";
    let config = parse(&format!("{MINIMAL}{inline}")).unwrap();
    for (address, setting) in [
        ("10.0.0.7", Some(Off)),
        ("::ffff:10.0.0.7", Some(Off)),
        ("10.0.0.8", Some(Required)),
        ("10.0.1.7", Some(Guessed)),
        ("192.0.2.9", Some(Required)),
        ("192.0.3.9", None),
        ("::", None),
    ] {
        assert_eq!(
            config
                .trusted_proxies
                .proxy_protocol(address.parse().unwrap()),
            setting,
            "{address}"
        );
    }
    let (found, remedy) = config.guessed_proxies().unwrap();
    assert!(
        found.starts_with("10.0.0.0/8: no proxy_protocol") && remedy.contains("\"10.0.0.0/8\""),
        "{found} {remedy}"
    );

    let tables = "[[trusted_proxies]]\naddress = \"10.0.0.0/8\"\nproxy_protocol = \"required\"\n\
                  [[trusted_proxies]]\naddress = \"fd00::1\"\nproxy_protocol = \"off\"\n";
    let config = parse(&format!("{MINIMAL}{tables}")).unwrap();
    assert_eq!(
        config.trusted_proxies,
        proxies(&[("10.0.0.0/8", Required), ("fd00::1/128", Off)])
    );
    assert_eq!(config.guessed_proxies(), None);
}

#[test]
fn every_mistake_about_a_proxy_names_its_entry() {
    let text = "trusted_proxies = [{ address = \"10.0.0.0/40\", proxy_protocol = \"on\", port = 1 \
                }, { adress = \"10.0.0.1\" }, \"10.0.0.0/8=optional\", { address = \"10.0.0.0/8\", \
                proxy_protocol = \"off\" }, \"10.1.2.3/8\", \"10.2.0.0/16\", \"10.2.0.0/16\"]\n";
    let errors = parse(&format!("{MINIMAL}{text}")).unwrap_err().0;
    assert_eq!(
        errors,
        [
            "trusted_proxies[0].address: \"10.0.0.0/40\" is not an address or a block such as \
             \"10.0.0.0/8\"",
            "trusted_proxies[0].proxy_protocol: \"on\" is not \"required\" or \"off\"",
            "trusted_proxies[0].port: no such key; docs/configuration.md lists the keys",
            "trusted_proxies[1].address: missing; it must be an address or a block such as \
             \"10.0.0.0/8\"",
            "trusted_proxies[1].proxy_protocol: missing; it must be \"required\" or \"off\"",
            "trusted_proxies[1].adress: no such key; did you mean `address`?",
            "trusted_proxies: \"10.0.0.0/8=optional\" is not a block and its setting, such as \
             \"10.0.0.0/8=required\" or \"10.0.0.0/8=off\"",
            "trusted_proxies: 10.1.2.3/8 is listed twice; keep one of the entries",
        ]
    );
    let in_variable = |name: &str| {
        (name == "GW_TRUSTED_PROXIES").then(|| "10.0.0.1=off,10.0.0.1=required".to_owned())
    };
    let error = Config::parse(MINIMAL, in_variable).unwrap_err();
    assert_eq!(
        error.0,
        ["GW_TRUSTED_PROXIES: 10.0.0.1/32 is listed twice; keep one of the entries"]
    );
}

#[test]
fn toml_syntax_errors_name_the_line() {
    assert!(
        parse("region = ")
            .unwrap_err()
            .to_string()
            .contains("line 1")
    );
}

#[test]
fn an_admin_listener_that_others_reach_without_tls_is_warned_about() {
    let warnings = |listen: &str| {
        let text = format!("{MINIMAL}admin_listen = \"{listen}\"\n");
        Config::check(&text, |_| None).unwrap().1
    };
    for loopback in [
        "127.0.0.1:9080",
        "127.9.9.9:1",
        "[::1]:9080",
        "[::ffff:127.0.0.1]:9080",
    ] {
        assert!(warnings(loopback).is_empty(), "{loopback}");
    }
    for reachable in ["0.0.0.0:9080", "[::]:9080", "10.0.0.1:9080"] {
        let warnings = warnings(reachable);
        assert!(
            warnings.len() == 1 && warnings[0].contains("admin_tls_certificate"),
            "{reachable}: {warnings:?}"
        );
    }
    let admin = CertificateFiles {
        certificate: "c".into(),
        key: "k".into(),
    };
    let config = Config {
        admin_certificate: Some(admin),
        ..parse(MINIMAL).unwrap()
    };
    assert_eq!(
        config.open_admin_listener("0.0.0.0:1".parse().unwrap()),
        None
    );
}

#[test]
fn further_region_keys_are_for_postgresql_and_the_archive() {
    let refused = |text: &str| {
        parse(&format!("{MINIMAL}region_key = \"k\"\n{text}"))
            .unwrap_err()
            .to_string()
    };
    let next = refused("region_key_next = \"n\"\n");
    assert!(
        next.contains("region_key_next: only for a store on PostgreSQL"),
        "{next}"
    );
    let previous = refused("region_key_previous = \"p\"\n");
    assert!(
        previous.contains("region_key_previous: only with [archive]"),
        "{previous}"
    );
    let postgres =
        "store = \"postgres://gw@localhost/gw\"\nregion_key = \"k\"\nregion_key_next = \"n\"\n";
    let config = parse(&format!("{MINIMAL}{postgres}")).unwrap();
    assert_eq!(
        (config.region_key, config.region_key_next),
        (Some("k".into()), Some("n".into()))
    );
    // A file that is missing is named with its setting.
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("region.key");
    RegionKey::create(&key).unwrap();
    let next = Some(folder.path().join("none"));
    let config = Config {
        region_key: Some(key),
        region_key_next: next,
        ..parse(MINIMAL).unwrap()
    };
    let missing = config.region_keys().err().unwrap().to_string();
    assert!(
        missing.starts_with("region_key_next: ") && missing.contains("none: No such file"),
        "{missing}"
    );
}

#[test]
fn an_archive_needs_the_region_key() {
    let environment = |name: &str| name.starts_with("AWS_").then(|| "secret".to_owned());
    let archive = format!("{MINIMAL}[archive]\nurl = \"s3://bucket\"\n");
    let error = Config::parse(&archive, environment)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("region_key: missing; the archive is encrypted"),
        "{error}"
    );
    let config = Config::parse(&format!("region_key = \"/k\"\n{archive}"), environment).unwrap();
    assert_eq!(config.archive.unwrap().bucket, "bucket");
}

#[test]
fn listeners_with_the_same_port_are_found() {
    for (one, other, expected) in [
        ("127.0.0.1:443", "127.0.0.1:443", true),
        ("0.0.0.0:443", "127.0.0.1:443", true),
        ("127.0.0.1:443", "[::]:443", true),
        ("0.0.0.0:443", "[::]:443", true),
        ("0.0.0.0:443", "[::1]:443", false),
        ("127.0.0.1:443", "127.0.0.2:443", false),
        ("127.0.0.1:443", "127.0.0.1:444", false),
        ("127.0.0.1:0", "127.0.0.1:0", false),
    ] {
        let (one, other) = (one.parse().unwrap(), other.parse().unwrap());
        assert_eq!(overlap(one, other), expected, "{one} {other}");
        assert_eq!(overlap(other, one), expected, "{other} {one}");
    }
}
