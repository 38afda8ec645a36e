//! Programs that work report no problem: in the checks of both `doctor`s, at `/readyz`, in the list
//! of warnings and in the logs.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::doctor::{
    BACKEND, HEALTH_CHECK, OF_AGENT, OF_NODE, assert_quiet, assert_quiet_gateway, doctor_of,
    examine, of_development, with,
};
use crate::support::peers::backend;
use crate::support::peers::tinyproxy::Tinyproxy;
use crate::support::processes::prepared::about;
use crate::support::processes::process::{
    Log, Running, Served, config_text, gw_agent, gw_gateway, serve, serve_command, start_demo,
    start_logged,
};
use crate::support::processes::region::Region;
use crate::support::processes::successor::admin;
use crate::support::scene::About;
use crate::support::{eventually, programs};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
/// Names of the gateway.
pub(super) const NAMES: [&str; 2] = ["eu1.gw.localhost", "*.eu1.gw.localhost"];

/// A gateway whose certificate is of an authority in a file, with the scene's account and service.
pub(super) struct Site {
    pub(super) folder: tempfile::TempDir,
    pub(super) served: Served,
    pub(super) about: About,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate for these names that ends after these days, and its key, as PEM.
fn issue(issuer: &Issuer<'_, KeyPair>, names: &[&str], days: i64) -> (String, String) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(names).unwrap();
    params.not_after = time::OffsetDateTime::now_utc() + time::Duration::days(days);
    let certificate = params.signed_by(&key, issuer).unwrap();
    (certificate.pem(), key.serialize_pem())
}

impl Site {
    pub(super) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let authority = |issuer: Option<&Issuer<'_, KeyPair>>| {
            let mut params = CertificateParams::default();
            let name = issuer.map_or("root", |_| "intermediate");
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let key = KeyPair::generate().unwrap();
            let made = match issuer {
                Some(issuer) => params.signed_by(&key, issuer),
                None => params.self_signed(&key),
            };
            (made.unwrap().pem(), Issuer::new(params, key))
        };
        let (root, issuer) = authority(None);
        let (intermediate, issuer) = authority(Some(&issuer));
        let (own, key) = issue(&issuer, &NAMES, 90);
        fs::write(path("ca.crt"), root).unwrap();
        fs::write(path("server.crt"), own + &intermediate).unwrap();
        fs::write(path("server.key"), key).unwrap();
        let text = format!(
            "{}tls_certificate = {:?}\ntls_key = {:?}\n",
            config_text(&path("data"), 0),
            path("server.crt"),
            path("server.key")
        );
        fs::write(path("gateway.toml"), text).unwrap();
        let served = serve(&mut serve_command(&path("gateway.toml")));
        let token = fs::read_to_string(path("data/admin.token")).unwrap();
        let site = Self {
            about: About {
                admin_url: format!("http://{}", served.admin_address),
                admin_token: token.trim().to_owned(),
                ..about(served.address, "", path("ca.crt"))
            },
            folder,
            served,
            issuer,
        };
        site.api().create_service("demo", "echo");
        site
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn api(&self) -> Api {
        Api::of(&self.about)
    }

    /// Enrolls an agent, with its state in the folder `agent`.
    pub(super) fn enroll(&self) {
        let token = self.api().create_enrollment_token("demo", &["echo"]);
        let enrolled = agent("enroll", &self.path("agent"))
            .args(["--gateway", &self.about.base_url, "--ca-file"])
            .arg(self.path("ca.crt"))
            .env("GW_ENROLLMENT_TOKEN", token)
            .output()
            .unwrap();
        assert!(enrolled.status.success(), "{enrolled:?}");
    }

    /// Starts an agent with `gw-agent run` and waits for its tunnel.
    pub(super) fn run(&self, command: &mut Command) -> (Running, Log) {
        let agent = start_logged(command);
        eventually("the agent has a tunnel", || {
            let tunnels = self.api().tunnels();
            (tunnels.first()?.state == "ready").then_some(())
        });
        agent
    }

    pub(super) fn doctor(&self) -> Command {
        self.doctor_with(&self.path("gateway.toml"))
    }

    /// `doctor` of the agent, with this backend.
    pub(super) fn agent_doctor(&self, backend: &str) -> Command {
        let mut command = agent("doctor", &self.path("agent"));
        command.args(["--backend", backend]);
        command
    }

    /// `doctor` with another configuration file.
    pub(super) fn doctor_with(&self, config: &Path) -> Command {
        doctor_of(config, &self.served)
    }

    /// Writes a certificate for these names that has the same issuer and ends after these days, and
    /// its key. Returns their files.
    pub(super) fn other_certificate(&self, names: &[&str], days: i64) -> (PathBuf, PathBuf) {
        let (certificate, key) = issue(&self.issuer, names, days);
        let files = (self.path("other.crt"), self.path("other.key"));
        let chain = fs::read_to_string(self.path("server.crt")).unwrap();
        let (_, intermediate) = chain.split_once("-----END CERTIFICATE-----\n").unwrap();
        fs::write(&files.0, certificate + intermediate).unwrap();
        fs::write(&files.1, key).unwrap();
        files
    }

    /// Ends the gateway. Returns the folder, which is deleted on drop.
    pub(super) fn stop(mut self) -> tempfile::TempDir {
        self.served.process.stop();
        self.folder
    }

    /// Checks all that the gateway says of itself.
    fn assert_healthy(&self) {
        examine(&mut self.doctor()).assert(&with(&OF_NODE, "services", &["audit log"]), &[]);
        assert_quiet_gateway(&self.served);
        let warnings = self.api().get("/warnings").body;
        assert_eq!(warnings, json!({ "items": [] }));
    }
}

/// A command of the agent's program, without the proxy variables of this machine.
pub(super) fn agent(name: &str, state: &Path) -> Command {
    let mut command = gw_agent();
    for variable in ["HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"] {
        command.env_remove(variable);
    }
    command.arg(name).arg("--state-dir").arg(state);
    command
}

#[test]
fn a_node_with_an_agent_has_nothing_to_complain_of() {
    let site = Site::start();
    site.enroll();
    let backend = backend::answering(OK);
    let mut run = agent("run", &site.path("agent"));
    let (_agent, log) = site.run(run.args(["--backend", &backend]));
    site.assert_healthy();
    examine(&mut site.agent_doctor(&backend)).assert(&OF_AGENT, &[]);
    assert_quiet(&log.until_now());
}

#[test]
fn an_agent_with_two_backends_and_a_metrics_listener_has_nothing_to_complain_of() {
    let site = Site::start();
    site.enroll();
    let file = site.path("agent.toml");
    let text = format!(
        "state_dir = {:?}\nbackend = [\"{}\", \"{}\"]\nhealth_check = \"/\"\n\
         metrics_listen = \"127.0.0.1:0\"\nlog_format = \"json\"\n",
        site.path("agent"),
        backend::answering(OK),
        backend::answering(OK)
    );
    fs::write(&file, text).unwrap();
    let command = |name: &str| {
        let mut command = agent(name, &site.path("agent"));
        command.arg("--config").arg(&file);
        command
    };
    let (_agent, log) = site.run(&mut command("run"));
    let mut lines = Vec::new();
    let metrics: SocketAddr = log.find(|line| {
        lines.push(line.clone());
        let address = line["address"].as_str()?.parse().ok();
        address.filter(|_| line["message"] == "serving metrics")
    });
    site.assert_healthy();
    let checks = with(&OF_AGENT, "core dumps", &["metrics_listen"]);
    let checks = with(&checks, BACKEND, &[BACKEND, HEALTH_CHECK, HEALTH_CHECK]);
    let variable = ("GW_AGENT_METRICS_LISTEN", metrics.to_string());
    let found = examine(command("doctor").env(variable.0, &variable.1));
    found.assert(&checks, &[]);
    let listener = &found.of("metrics_listen").found;
    assert!(
        listener.ends_with("an agent has it and answers"),
        "{listener}"
    );
    let ready = admin(metrics, "/readyz");
    assert_eq!(ready, (200, "ready\n".to_owned()));
    assert_quiet(&lines);
    assert_quiet(&log.until_now());
}

#[test]
fn an_agent_behind_a_proxy_has_nothing_to_complain_of() {
    if !programs::usable(&["tinyproxy"]) {
        return;
    }
    let site = Site::start();
    let proxy = Tinyproxy::start(None);
    let variable = ("GW_PROXY", format!("http://{}", proxy.address));
    site.enroll();
    // The proxy does not resolve names below `localhost`.
    let file = site.path("agent/agent.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    state["gateway_host"] = json!("127.0.0.1");
    fs::write(&file, state.to_string()).unwrap();
    let backend = backend::answering(OK);
    let command = |name: &str| {
        let mut command = agent(name, &site.path("agent"));
        command
            .args(["--backend", &backend])
            .env(variable.0, &variable.1);
        command
    };
    let (_agent, log) = site.run(&mut command("run"));
    site.assert_healthy();
    let through_proxy = OF_AGENT.map(|check| match check {
        "gateway's name" => "proxy",
        check => check,
    });
    examine(&mut command("doctor")).assert(&through_proxy, &[]);
    assert_quiet(&log.until_now());
}

#[test]
fn a_demo_has_nothing_to_complain_of_but_its_own_authority() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("demo");
    let log = folder.path().join("log");
    let mut command = gw_gateway();
    command
        .args(["demo", "--workers", "2", "--data-dir"])
        .arg(&data)
        .stderr(fs::File::create(&log).unwrap());
    let (_demo, about) = start_demo(&mut command);
    let at = |name: &str| {
        let (_, port) = about[name].as_str().unwrap().rsplit_once(':').unwrap();
        format!("127.0.0.1:{port}")
    };
    let config = folder.path().join("gateway.toml");
    fs::write(&config, config_text(&data, 0)).unwrap();
    let mut doctor = gw_gateway();
    doctor
        .args(["doctor", "--config"])
        .arg(&config)
        .env("GW_LISTEN", at("base_url"))
        .env("GW_ADMIN_LISTEN", at("admin_url"));
    let checks = with(&OF_NODE, "services", &["audit log"]);
    let checks = of_development(&checks);
    examine(&mut doctor).assert(&checks, &[("certificate", "warning")]);
    let backend = backend::answering(OK);
    let mut doctor = agent("doctor", &data.join("agent"));
    examine(doctor.args(["--backend", &backend])).assert(&OF_AGENT, &[]);
    let address = at("admin_url").parse().unwrap();
    assert_eq!(admin(address, "/readyz"), (200, "ready\n".to_owned()));
    let written = fs::read_to_string(&log).unwrap();
    assert_quiet(&written.lines().map(Value::from).collect::<Vec<_>>());
}

#[test]
fn a_region_of_three_has_nothing_to_complain_of() {
    let Some(region) = Region::start(3) else {
        return;
    };
    // Without a standby, `doctor` warns of the store.
    let _standby = region.postgres.standby();
    let sql = |text: &str| region.postgres.sql(text);
    sql("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'");
    sql("SELECT pg_reload_conf()");
    eventually("the standby is synchronous", || {
        (sql("SELECT sync_state FROM pg_stat_replication") == "quorum").then_some(())
    });
    let backend = backend::answering(OK);
    let _agent = region.run_agent(&backend);
    eventually("every node relays", || {
        (0..3)
            .all(|node| region.request(node) == "200")
            .then_some(())
    });
    let of_store = [
        "store: notifications",
        "store",
        "store: version",
        "store: primary",
        "store: durability",
        "store: standby",
        "store: clock",
        "region",
        "region key",
        "records",
        "other nodes",
    ];
    let checks = with(&OF_NODE, "secrets at rest", &of_store);
    let checks = with(&checks, "admin_listen", &["peer_listen"]);
    let checks = of_development(&with(&checks, "services", &["audit log"]));
    for node in 0..3 {
        let found = examine(&mut doctor_of(&region.config(node), region.node(node)));
        // The development authority of a region is made for tests.
        found.assert(&checks, &[("certificate", "warning")]);
        let others = &found.of("other nodes").found;
        assert!(
            others.contains("node ") && others.contains(", node "),
            "{others}"
        );
        let warnings = region.get(node, "/warnings").body;
        assert_eq!(warnings, json!({ "items": [] }));
        assert_quiet_gateway(region.node(node));
    }
    let mut doctor = agent("doctor", &region.agent_folder());
    examine(doctor.args(["--backend", &backend])).assert(&OF_AGENT, &[]);
    let output = gw_gateway()
        .args(["region", "status", "--config"])
        .arg(region.config(0))
        .env("GW_ADMIN_LISTEN", region.node(0).admin_address.to_string())
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{shown}"
    );
    assert!(!shown.to_lowercase().contains("warning"), "{shown}");
}
