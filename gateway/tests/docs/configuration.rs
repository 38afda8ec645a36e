//! docs/configuration.md and the examples have every key of the programs, and no others.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use gw_interface::config::Config;
use gw_shared::config::VARIABLES;

use crate::sources::markdown::{code, rows, section, split};
use crate::{assert_same, read, repository};

pub(crate) const REQUIRED: &str =
    "region = 'eu1'\ndomain = 'example.com'\ndata_dir = '/var/lib/gw'\n";

pub(crate) fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, |_| None).map_err(|error| error.to_string())
}

/// Every environment variable that the gateway asks for while it reads its configuration.
fn gateway_variables() -> BTreeSet<String> {
    let asked = RefCell::new(BTreeSet::new());
    for collector in [None, Some("http://127.0.0.1:4318")] {
        let environment = |name: &str| {
            asked.borrow_mut().insert(name.to_owned());
            collector
                .filter(|_| name.starts_with("OTEL_") && name.ends_with("_ENDPOINT"))
                .map(str::to_owned)
        };
        drop(Config::parse(REQUIRED, environment));
    }
    asked.into_inner()
}

/// Every key of gateway.toml: each of them has a variable.
pub(crate) fn gateway_keys() -> BTreeSet<String> {
    let names = gateway_variables();
    let keys = names
        .iter()
        .filter_map(|name| Some(name.strip_prefix("GW_")?.to_ascii_lowercase()));
    let refusal = |key: &str| parse(&format!("{key} = 1")).unwrap_err();
    let refused = refusal("nonsense");
    let unknown = refused
        .lines()
        .find(|line| line.contains("nonsense"))
        .unwrap();
    // A tip follows the semicolon.
    let (unknown, _) = unknown.split_once(';').unwrap();
    let is_unknown = |key: &str| refusal(key).contains(&unknown.replace("nonsense", key));
    // A key of a table has a dot where its variable has the first `_`, and one of a table in a
    // table also has the second.
    keys.map(|key| {
        let of_table = key.replacen('_', ".", 1);
        let of_inner_table = key.replacen('_', ".", 2);
        let mut names = [&key, &of_table, &of_inner_table].into_iter();
        names.find(|key| !is_unknown(key)).unwrap().clone()
    })
    .collect()
}

/// An agent that is enrolled, in a folder of its own.
pub(crate) struct Agent(tempfile::TempDir);

impl Agent {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let enrollment = serde_json::json!({
            "agent_id": "ag_0123456789abcdefghij",
            "gateway_name": "eu1.example.com",
            "gateway_host": "eu1.example.com",
            "gateway_port": 443,
            "services": ["acme--api.eu1.example.com"],
        });
        fs::write(folder.path().join("agent.json"), enrollment.to_string()).unwrap();
        Self(folder)
    }

    /// Reads `text` as agent.toml.
    pub(crate) fn load(
        &self,
        text: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<(), String> {
        let file = self.0.path().join("agent.toml");
        fs::write(&file, text).unwrap();
        let loaded = gw_agent::Config::load(
            Some(&file),
            Some(self.0.path().to_owned()),
            &[],
            environment,
        );
        loaded.map(drop).map_err(|error| error.to_string())
    }
}

/// Every environment variable that the agent asks for while it reads its configuration.
fn agent_variables() -> BTreeSet<String> {
    let asked = RefCell::new(BTreeSet::new());
    let environment = |name: &str| {
        asked.borrow_mut().insert(name.to_owned());
        None
    };
    Agent::new()
        .load("backend = 'http://127.0.0.1:8080'", environment)
        .unwrap();
    asked.into_inner()
}

/// Every environment variable that configures a program.
pub(crate) fn all_variables() -> BTreeSet<String> {
    gateway_variables()
        .into_iter()
        .chain(agent_variables())
        .collect()
}

/// Keys of a table of backends: the error about one that does not exist lists those that do.
pub(crate) fn backend_keys() -> BTreeSet<String> {
    let error = Agent::new()
        .load("backend = { nonsense = 1 }", |_| None)
        .unwrap_err();
    // "...: no such key; there are A, B, C"
    let list = error
        .split(';')
        .next_back()
        .unwrap()
        .lines()
        .next()
        .unwrap()
        .split(", ");
    list.map(|words| words.rsplit(' ').next().unwrap().to_owned())
        .collect()
}

fn set(keys: &[&str]) -> BTreeSet<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

#[test]
fn keys_and_variables_are_read_off_the_programs() {
    let gateway = gateway_keys();
    assert!(
        set(&["region", "listen", "traces.sample_ratio"]).is_subset(&gateway) && gateway.len() > 25,
        "{gateway:?}"
    );
    let agent = agent_variables();
    assert!(
        set(&["GW_BACKEND", "GW_LOG_FORMAT", "GW_TRACES_ENDPOINT"]).is_subset(&agent),
        "{agent:?}"
    );
    let backend = backend_keys();
    assert!(
        set(&["urls", "host", "client_key"]).is_subset(&backend),
        "{backend:?}"
    );
}

pub(crate) const PAGE: &str = "docs/configuration.md";

/// The keys in the tables of a section.
fn documented(section: &str) -> BTreeSet<String> {
    let rows = rows(section, "key");
    rows.iter()
        .flat_map(|cells| code(&cells[0]))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_page_has_every_key_of_the_gateway_and_no_other() {
    assert_same(
        PAGE,
        documented(section(&read(PAGE), "Gateway")),
        &gateway_keys(),
    );
}

/// The example has every key of the agent: see below.
#[test]
fn the_page_has_every_key_of_the_agent_and_no_other() {
    let example = all_keys_of(&read(AGENT_EXAMPLE)).parse().unwrap();
    // `traces` is a table, and its keys may be written with or without its name.
    let documented = documented(section(&read(PAGE), "Agent"))
        .into_iter()
        .filter(|key| key != "traces");
    let documented = documented.map(|key| key.trim_start_matches("traces.").to_owned());
    assert_same(PAGE, documented, &agent_keys_of(&example));
}

#[test]
fn the_page_has_every_variable_that_configures() {
    let page = read(PAGE);
    let keys = gateway_keys();
    // The variable of a key of the gateway is the key in capitals.
    let of_gateway = gateway_variables().into_iter().filter(|name| {
        let key = name
            .strip_prefix("GW_")
            .unwrap_or_default()
            .to_ascii_lowercase();
        (0..=2).all(|dots| !keys.contains(&key.replacen('_', ".", dots)))
    });
    let agent = section(&page, "Agent");
    for (name, text) in of_gateway
        .map(|name| (name, page.as_str()))
        .chain(agent_variables().into_iter().map(|it| (it, agent)))
    {
        let otel = name.starts_with("OTEL_") && text.contains("`OTEL_*`");
        assert!(
            otel || text.contains(&format!("`{name}`")),
            "{PAGE} lacks {name}"
        );
    }
}

/// The list by which the programs find misspelt variables.
#[test]
fn every_variable_of_the_programs_is_known() {
    let page = read(PAGE);
    let documented = page.split('`').filter(|text| {
        let is_name = |text: &str| {
            text.bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte == b'_')
        };
        text.strip_prefix("GW_")
            .is_some_and(|rest| !rest.is_empty() && is_name(rest))
    });
    for name in all_variables()
        .iter()
        .map(String::as_str)
        .chain(documented)
        .filter(|name| name.starts_with("GW_"))
    {
        assert!(
            VARIABLES.contains(&name),
            "gw_shared::config::VARIABLES lacks {name}"
        );
    }
}

/// A line `key = value`; texts need no quotes.
fn assignment(key: &str, value: &str) -> String {
    let line = format!("{key} = {value}\n");
    if line.parse::<toml::Table>().is_ok() {
        line
    } else {
        format!("{key} = '{value}'\n")
    }
}

#[test]
fn the_documented_defaults_of_the_gateway_are_its_defaults() {
    let defaults = format!("{:?}", parse(REQUIRED).unwrap());
    let page = read(PAGE);
    let mut compared = 0;
    for cells in rows(section(&page, "Gateway"), "key") {
        let (Some(key), Some(default)) = (code(&cells[0]).next(), code(&cells[2]).next()) else {
            continue;
        };
        let config = parse(&format!("{REQUIRED}{}", assignment(key, default)));
        assert_eq!(
            format!("{:?}", config.unwrap()),
            defaults,
            "{key} = {default}"
        );
        compared += 1;
    }
    assert!(compared >= 18, "defaults between backticks: {compared}");
}

const GATEWAY_EXAMPLE: &str = "packaging/examples/gateway.toml";
const AGENT_EXAMPLE: &str = "packaging/examples/agent.toml";

/// The key of a line `#key = value`.
fn key_behind_hash(line: &str) -> Option<&str> {
    let (key, _) = line.strip_prefix('#')?.split_once(" = ")?;
    key.bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        .then_some(key)
}

/// The example with every key in force.
fn all_keys_of(example: &str) -> String {
    example
        .lines()
        .map(|line| format!("{}\n", key_behind_hash(line).map_or(line, |_| &line[1..])))
        .collect()
}

/// The keys of a table and its tables, with a dot between.
fn keys_of(table: &toml::Table) -> BTreeSet<String> {
    let keys = table.iter().flat_map(|(key, value)| match value {
        toml::Value::Table(inner) => keys_of(inner)
            .into_iter()
            .map(|it| format!("{key}.{it}"))
            .collect(),
        _ => vec![key.clone()],
    });
    keys.collect()
}

#[test]
fn the_gateway_accepts_its_example() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gw-gateway"));
    command
        .args(["serve", "--check", "--config"])
        .arg(repository().join(GATEWAY_EXAMPLE));
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{stderr}");
}

/// Keys without a default, and one whose default depends on the machine.
const WITHOUT_DEFAULT: [&str; 42] = [
    "agent_programs",
    "access_key_id",
    "ca_file",
    "challenge",
    "contact",
    "dns_servers",
    "eab_key_file",
    "eab_key_id",
    "key_file",
    "key_name",
    "program",
    "server",
    "tls",
    "zone",
    "admin_hosts",
    "admin_tls_certificate",
    "admin_tls_key",
    "allow_http",
    "bandwidth_mib_per_second",
    "ca",
    "endpoint",
    "isolation",
    "listen_http",
    "max_staleness_seconds",
    "path_style",
    "peer_address",
    "peer_listen",
    "region",
    "region_key",
    "region_key_next",
    "region_key_previous",
    "relay_memory_mib",
    "request_log_max_bytes",
    "seal_key",
    "secret_key_file",
    "store",
    "store_ca",
    "store_password_file",
    "tls_certificate",
    "tls_key",
    "trusted_proxies",
    "url",
];

#[test]
fn the_example_of_the_gateway_has_every_key_and_its_default() {
    let example = read(GATEWAY_EXAMPLE);
    let folder = tempfile::tempdir().unwrap();
    let all = with_files(&all_keys_of(&example), folder.path());
    // Only one of both: seal_key is for SQLite, and `store` of the example is PostgreSQL; files
    // have no authority.
    let excluded = ["seal_key = ", "tls_certificate = ", "tls_key = "];
    let (excluded, others): (Vec<&str>, Vec<&str>) = all
        .lines()
        .partition(|line| excluded.iter().any(|key| line.starts_with(key)));
    assert_eq!(excluded.len(), 3);
    let terms = ["terms_accepted = false", "terms_accepted = true"];
    parse(&others.join("\n").replace(terms[0], terms[1])).unwrap();
    assert_same(
        GATEWAY_EXAMPLE,
        keys_of(&all.parse().unwrap()),
        &gateway_keys(),
    );
    let defaults = format!("{:?}", parse(&example).unwrap());
    for line in example
        .lines()
        .filter(|line| key_behind_hash(line).is_some_and(|key| !WITHOUT_DEFAULT.contains(&key)))
    {
        let config = parse(&example.replace(line, &line[1..])).unwrap();
        assert_eq!(format!("{config:?}"), defaults, "{line}");
    }
}

/// Replaces the names of files in `/etc/gw-agent` and `/etc/gw` by those of files that exist: a key
/// or a secret where the name says so, else a certificate of the key.
fn with_files(text: &str, folder: &Path) -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["agent.example.com".to_owned()]).unwrap();
    let certificate = certificate.self_signed(&key).unwrap();
    fs::write(folder.join("key"), key.serialize_pem()).unwrap();
    fs::write(folder.join("certificate"), certificate.pem()).unwrap();
    fs::write(folder.join("secret"), "secret\n").unwrap();
    let text = text.replace("/etc/gw-agent/", "/etc/gw/");
    let mut parts = text.split("/etc/gw/");
    let mut replaced = parts.next().unwrap().to_owned();
    for part in parts {
        let (name, rest) = part.split_once('"').unwrap();
        let file = ["key", "secret"]
            .into_iter()
            .find(|word| name.contains(word))
            .unwrap_or("certificate");
        let file = folder.join(file);
        replaced += &format!("{}\"{rest}", file.display());
    }
    replaced
}

/// The keys of agent.toml outside of tables of backends.
pub(crate) fn agent_keys() -> BTreeSet<String> {
    let mut example: toml::Table = all_keys_of(&read(AGENT_EXAMPLE)).parse().unwrap();
    example["backends"] = toml::Value::Boolean(true);
    keys_of(&example)
}

/// The keys of agent.toml: those of the file, of its table `traces`, and of tables of backends.
fn agent_keys_of(file: &toml::Table) -> BTreeSet<String> {
    let tables = file["backends"]
        .as_table()
        .unwrap()
        .values()
        .chain([&file["traces"]]);
    let inner = tables
        .filter_map(toml::Value::as_table)
        .flat_map(|table| table.keys());
    inner
        .chain(file.keys().filter(|key| *key != "traces"))
        .cloned()
        .collect()
}

#[test]
fn the_agent_accepts_its_example_with_every_key() {
    let agent = Agent::new();
    let example = read(AGENT_EXAMPLE);
    agent.load(&example, |_| None).unwrap();
    let all = all_keys_of(&example);
    agent
        .load(&with_files(&all, agent.0.path()), |_| None)
        .unwrap();
    let used = agent_keys_of(&all.parse().unwrap());
    assert!(backend_keys().is_subset(&used), "{used:?}");
    // Keys have variables, but for those of `backends`.
    for name in agent_variables()
        .iter()
        .filter_map(|name| name.strip_prefix("GW_"))
    {
        let key = name.to_ascii_lowercase();
        let named = [
            key.as_str(),
            key.trim_start_matches("agent_"),
            key.trim_start_matches("traces_"),
            // `host` of a backend.
            key.trim_end_matches("_header"),
        ];
        let has_no_key = key == "agent_max_concurrent_backend_requests";
        assert!(
            has_no_key || named.iter().any(|key| used.contains(*key)),
            "{AGENT_EXAMPLE} lacks {key}"
        );
    }
}

/// Blocks of TOML on a page are parts of gateway.toml or of agent.toml.
#[test]
fn the_programs_accept_the_configuration_on_every_page() {
    let agent = Agent::new();
    let mut accepted = 0;
    for page in fs::read_dir(repository().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
    {
        if page.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        for block in split(&fs::read_to_string(&page).unwrap())
            .1
            .iter()
            .filter(|block| block.info == "toml")
        {
            let required = if block.text.contains("region = ") {
                ""
            } else {
                REQUIRED
            };
            let gateway = parse(&with_files(
                &format!("{required}{}", block.text),
                agent.0.path(),
            ));
            let backend = if block.text.contains("backend") {
                ""
            } else {
                "backend = 'http://127.0.0.1:8080'\n"
            };
            let agent = agent.load(
                &with_files(&format!("{backend}{}", block.text), agent.0.path()),
                |_| None,
            );
            if let (Err(gateway), Err(agent)) = (&gateway, &agent) {
                panic!(
                    "{}:{}:\nas gateway.toml: {gateway}\nas agent.toml: {agent}",
                    page.display(),
                    block.line
                );
            }
            accepted += 1;
        }
    }
    assert!(accepted >= 3, "{accepted}");
}
