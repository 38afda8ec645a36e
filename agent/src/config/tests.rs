use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gw_shared::id::AgentId;

use super::*;

const A: &str = "acme--a.eu1.example.com";
const B: &str = "acme--b.eu1.example.com";

/// Loads this configuration file for an agent that is enrolled for the services A and B.
fn load(toml: &str, backend: Option<&str>) -> Result<Config, ConfigError> {
    let directory = tempfile::tempdir().unwrap();
    let enrollment = Enrollment {
        agent_id: AgentId::random(),
        gateway_name: "eu1.example.com".into(),
        gateway_host: "eu1.example.com".into(),
        gateway_port: 443,
        services: vec![A.into(), B.into()],
        later: Default::default(),
    };
    StateDir::new(directory.path())
        .write_enrollment(&enrollment)
        .unwrap();
    let file = directory.path().join("agent.toml");
    std::fs::write(&file, toml).unwrap();
    let backends: Vec<String> = backend.map(str::to_owned).into_iter().collect();
    let state_dir = Some(directory.path().into());
    Config::load(Some(&file), state_dir, &backends, |_| None)
}

/// The mistakes that are found in a configuration.
fn mistakes(loaded: Result<Config, ConfigError>) -> Vec<String> {
    match loaded {
        Err(ConfigError::Invalid(ConfigErrors(errors))) => errors,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("no mistake found"),
    }
}

#[test]
fn backend_option_overrides_named_backends_and_fallback() {
    let toml = format!("backend = 'http://rest:2'\n[backends]\n'{A}' = 'http://a:1'");
    let url = |config: &Config, hostname| config.backends.of(hostname).unwrap().to_string();
    let config = load(&toml, None).unwrap();
    let urls = [A, B, "acme--new.eu1.example.com"].map(|hostname| url(&config, hostname));
    assert_eq!(urls, ["http://a:1", "http://rest:2", "http://rest:2"]);
    let config = load(&toml, Some("http://all:3")).unwrap();
    assert_eq!(
        [A, B].map(|hostname| url(&config, hostname)),
        ["http://all:3"; 2]
    );
}

#[test]
fn standby_and_health_check_apply_to_all_services_and_a_table_has_its_own() {
    let config = load("backend = 'http://a:1'", None).unwrap();
    assert!(!config.standby && config.backends.of(A).unwrap().health_check().is_none());
    let toml = format!(
        "standby = true\nhealth_check = '/up'\nbackend = 'http://a:1'\n\
             [backends]\n'{A}' = {{ urls = 'http://a:2', health_check = 'tcp' }}"
    );
    let checks = |config: &Config| {
        [A, B].map(|hostname| {
            let backends = config.backends.of(hostname).unwrap();
            backends.health_check().unwrap().to_string()
        })
    };
    let config = load(&toml, None).unwrap();
    assert!(config.standby);
    assert_eq!(checks(&config), ["a connection", "GET /up"]);
    let config = load(&toml, Some("http://all:3")).unwrap();
    assert_eq!(checks(&config), ["GET /up", "GET /up"]);
}

#[test]
fn mistakes_in_standby_and_health_check_name_the_key() {
    for (key, value) in [
        ("health_check", "'up'"),
        ("health_check", "'/a b'"),
        ("standby", "'often'"),
    ] {
        let toml = format!("{key} = {value}\nbackend = 'http://a:1'");
        let error = load(&toml, None).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn a_backend_is_a_port_an_address_or_a_url() {
    for (text, url) in [
        ("3000", "http://localhost:3000"),
        ("localhost:3000", "http://localhost:3000"),
        ("[::1]:3000", "http://[::1]:3000"),
        ("http://10.0.0.7:3000", "http://10.0.0.7:3000"),
        ("h2c://backend", "h2c://backend"),
        ("unix:/run/b.sock", "unix:/run/b.sock"),
    ] {
        assert_eq!(backend_url(text).as_deref(), Ok(url), "{text}");
    }
    let hosts = ["localhost", "localhost:", "localhost:0"];
    let others = ["", "0", "65536", "-1", "3000/path", "http://h/path"];
    for wrong in hosts.into_iter().chain(others) {
        assert!(backend_url(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn all_mistakes_are_reported() {
    let toml = format!("backend = 'h'\nbackends = {{ '{A}' = 'ftp://x' }}");
    let errors = mistakes(load(&toml, Some("")));
    assert_eq!(errors.len(), 3, "{errors:?}");
}

#[test]
fn metrics_address_is_read_from_file_and_variable() {
    for (in_file, variable, port, mistakes) in [
        (None, None, None, 0),
        (Some("127.0.0.1:1"), None, Some(1), 0),
        (Some("127.0.0.1:1"), Some("[::1]:2"), Some(2), 0),
        (Some("127.0.0.1:1"), Some(""), None, 0),
        (Some("localhost"), None, None, 1),
    ] {
        let mut errors = Vec::new();
        let environment = move |_: &str| variable.map(str::to_owned);
        let found = listen_address(in_file.map(toml::Value::from), &environment, &mut errors);
        assert_eq!(
            found.map(|address| address.port()),
            port,
            "{in_file:?} {variable:?}"
        );
        assert_eq!(errors.len(), mistakes, "{in_file:?} {variable:?}");
    }
    let config = load("backend = 'http://b'\nmetrics_listen = '127.0.0.1:9'", None).unwrap();
    assert_eq!(config.metrics_listen.map(|address| address.port()), Some(9));
}

#[test]
fn traces_are_configured_by_file_and_variables() {
    let traces = |toml: &str| load(&format!("backend = 'http://b'\n{toml}"), None);
    assert_eq!(traces("").unwrap().traces, None);
    let config = traces("[traces]\nendpoint = 'http://c:4318'\nsample_ratio = 1").unwrap();
    let settings = config.traces.unwrap();
    assert_eq!(settings.endpoint.as_str(), "http://c:4318/v1/traces");
    assert_eq!(settings.sample_ratio, 1.0);
    let errors = mistakes(traces("[traces]\nendpoint = 'c'\nsample_ratio = -1"));
    let keys = errors.iter().map(|error| error.split(':').next().unwrap());
    assert!(
        keys.eq(["traces.endpoint", "traces.sample_ratio"]),
        "{errors:?}"
    );
    mistakes(traces("[traces]\ncolour = 1"));
}

#[test]
fn one_or_two_release_keys_are_read() {
    let [one, other, third] = [1_u8, 2, 3].map(|byte| STANDARD.encode([byte; 32]));
    let read = |text: &str, variable: Option<&str>| {
        let environment = |name: &str| {
            variable
                .filter(|_| name == "GW_UPDATE_KEY")
                .map(str::to_owned)
        };
        let mut keys = Keys::parse(&format!("update = 'auto'\n{text}"), &environment).unwrap();
        let accepted = release_keys(&mut keys)
            .map(|keys| keys.iter().map(ToString::to_string).collect::<Vec<_>>());
        accepted.ok_or(keys.errors)
    };
    let file = |value: &str| format!("update_key = {value}");
    let both = Ok(vec![one.clone(), other.clone()]);
    assert_eq!(
        read(&file(&format!("'{one}'")), None),
        Ok(vec![one.clone()])
    );
    assert_eq!(read(&file(&format!("['{one}', '{other}']")), None), both);
    let variable = format!("{one}, {other}");
    assert_eq!(read(&file(&format!("'{third}'")), Some(&variable)), both);
    for wrong in [
        format!("['{one}', '{one}']"),
        format!("['{one}', '{other}', '{third}']"),
        "['x']".to_owned(),
    ] {
        let errors = read(&file(&wrong), None).unwrap_err();
        let [error] = &errors[..] else {
            panic!("{errors:?}")
        };
        assert!(error.starts_with("update_key: "), "{error}");
    }
}

#[test]
fn at_least_one_service_needs_a_backend() {
    let error = load("", None).unwrap_err().to_string();
    for part in [A, B, "--backend"] {
        assert!(error.contains(part), "{error}");
    }
    let toml = format!("backends = {{ '{A}' = 'http://a:1', other = 'http://o:1' }}");
    let config = load(&toml, None).unwrap();
    assert!(config.backends.of(A).is_some() && config.backends.of(B).is_none());
}

#[test]
fn agent_must_be_enrolled() {
    let directory = tempfile::tempdir().unwrap();
    let error = Config::load(None, Some(directory.path().into()), &[], |_| None).unwrap_err();
    assert!(error.to_string().starts_with("not enrolled: "), "{error}");
}
