use super::*;

fn checked(toml: &str) -> Result<Backends, Vec<String>> {
    let value: toml::Table = toml.parse().unwrap();
    let mut mistakes = Vec::new();
    let backends = Backends::from_toml("b", &value["b"], &mut mistakes);
    backends.filter(|_| mistakes.is_empty()).ok_or(mistakes)
}

#[test]
fn backends_are_a_url_a_list_or_a_table() {
    for (toml, written) in [
        ("b = 'http://localhost:8080/'", "http://localhost:8080"),
        (
            "b = ['http://[::1]', 'unix:/run/b.sock']",
            "http://[::1]:80, unix:/run/b.sock",
        ),
        (
            "b = { urls = ['https://h', 'h2c://h:1'], host = 'rewrite' }",
            "https://h:443, h2c://h:1",
        ),
        ("b = { urls = 'unix:///run/b' }", "unix:/run/b"),
    ] {
        assert_eq!(checked(toml).unwrap().to_string(), written);
    }
}

#[test]
fn a_health_check_is_a_word_or_a_path() {
    let path = PathAndQuery::from_static("/up?quick=1");
    for (table, expected) in [
        ("", None),
        ("health_check = ''", Some(HealthCheck::Off)),
        ("health_check = 'tcp'", Some(HealthCheck::Tcp)),
        (
            "health_check = '/up?quick=1'",
            Some(HealthCheck::Http(path)),
        ),
    ] {
        let backends = checked(&format!("b = {{ urls = 'http://h', {table} }}")).unwrap();
        assert_eq!(backends.health_check, expected, "{table}");
    }
}

#[test]
fn the_host_is_rewritten_to_that_of_the_url() {
    let rewriting = checked("b = { urls = ['http://h:8'], host = 'rewrite' }").unwrap();
    assert_eq!(rewriting.host, HostHeader::Rewrite);
    assert_eq!(rewriting.endpoints[0].authority, "h:8");
}

#[test]
fn invalid_urls_are_rejected() {
    for bad in [
        "",
        "localhost:80",
        "ftp://h",
        "http://h/path",
        "http://u@h",
        "http://h?q",
        "http://",
        "http://h:99999",
        "http://h:",
        "unix:relative",
        "unix:",
        "https://a b",
    ] {
        let mistakes = checked(&format!("b = '{bad}'")).unwrap_err();
        assert!(
            mistakes.len() == 1 && mistakes[0].starts_with("b: "),
            "{bad}: {mistakes:?}"
        );
    }
    let long = format!("b = 'unix:/{}'", "a".repeat(200));
    assert!(checked(&long).is_err());
}

#[test]
fn all_mistakes_are_reported_with_their_keys() {
    let mistakes = checked(
        "b = { urls = ['https://h', 'gopher://h', 7], host = 'keep', health_check = 'up', \
         http_version = '3', connect_timeout_seconds = 0, ca_file = '/none.pem', server_name = 'a \
         b',\nclient_key = '/none.key', colour = 'red' }",
    )
    .unwrap_err();
    for key in [
        "b: ",
        "b.urls: ",
        "b.host: ",
        "b.health_check: ",
        "b.http_version: ",
        "b.connect_timeout_seconds: ",
        "b.ca_file: ",
        "b.server_name: ",
        "b.client_certificate: ",
        "b.colour: ",
    ] {
        let is_named = mistakes.iter().any(|mistake| mistake.starts_with(key));
        assert!(is_named, "{key}: {mistakes:?}");
    }
    assert_eq!(mistakes.len(), 10, "{mistakes:?}");
    let unused = checked("b = { urls = 'http://h', ca_file = '/none.pem' }").unwrap_err();
    assert_eq!((unused.len(), unused[0].contains("https://")), (1, true));
    for empty in ["b = []", "b = {}", "b = { urls = [] }", "b = 5"] {
        assert_eq!(checked(empty).unwrap_err().len(), 1, "{empty}");
    }
}
