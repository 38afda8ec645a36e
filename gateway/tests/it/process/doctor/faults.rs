//! Faults that each fail one check of `doctor` and no other.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

use serde_json::{Value, json};

use super::healthy::{NAMES, Site};
use crate::support::doctor::{BACKEND, Findings, HEALTH_CHECK, OF_NODE, TUNNEL, examine};
use crate::support::peers::backend;
use crate::support::programs;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const BROKEN: &str = "HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n";

/// What `doctor` finds beside the running gateway, with a configuration that `edit` has changed.
fn with_configuration(site: &Site, edit: impl FnOnce(String) -> String) -> Findings {
    let file = site.path("changed.toml");
    let text = fs::read_to_string(site.path("gateway.toml")).unwrap();
    fs::write(&file, edit(text)).unwrap();
    examine(&mut site.doctor_with(&file))
}

/// The address of a program that is neither a gateway nor an agent.
fn taken() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    address.to_string()
}

/// Writes `leaf.crt`: the certificate of the site without that of its authority.
fn write_leaf(site: &Site) {
    let chain = fs::read_to_string(site.path("server.crt")).unwrap();
    let end = chain.find("-----END").unwrap();
    let end = end + chain[end..].find('\n').unwrap();
    fs::write(site.path("leaf.crt"), &chain[..=end]).unwrap();
}

/// The configuration of an archive at an endpoint that does not answer.
fn archive(site: &Site) -> String {
    let private = |name: &str, contents: &str| {
        let path = site.path(name);
        fs::write(&path, contents).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    };
    let secret = private("secret", "x\n");
    let region_key = private("region.key", &"5a".repeat(32));
    format!(
        "region_key = {region_key:?}\n[archive]\nurl = \"s3://bucket\"\n\
         endpoint = \"http://127.0.0.1:1\"\naccess_key_id = \"x\"\nsecret_key_file = {secret:?}\n"
    )
}

#[test]
fn each_setting_of_a_gateway_that_does_not_work_fails_its_check() {
    let site = Site::start();
    let other = site.other_certificate(&["other.test"], 90);
    write_leaf(&site);
    let quoted = |name: &str| format!("{:?}", site.path(name));
    let certificate = quoted("server.crt");
    let key = quoted("server.key");
    let more = |line: &str| (String::new(), line.to_owned());
    let other_pair = (
        format!("{certificate}\ntls_key = {key}"),
        format!("{:?}\ntls_key = {:?}", other.0, other.1),
    );
    let names = [
        ("name of the apex", "failed"),
        ("names of tenants", "failed"),
    ];
    for ((from, to), complaints) in [
        (
            more("core_dumps = true\n"),
            &[("core dumps", "warning")][..],
        ),
        (
            more("access_log = \"/nowhere/a\"\n"),
            &[("access_log", "failed")],
        ),
        (
            more("trusted_proxies = [\"10.0.0.0/8\", \"192.0.2.1=off\"]\n"),
            &[("trusted_proxies", "failed")],
        ),
        (
            more(&format!("seal_key = {}\n", quoted("none"))),
            &[("secrets at rest", "failed")],
        ),
        (more(&archive(&site)), &[("archive", "failed")]),
        (
            (key.clone(), quoted("other.key")),
            &[("certificate: key", "failed")],
        ),
        (other_pair, &[("certificate: names", "failed")]),
        (
            (certificate.clone(), quoted("leaf.crt")),
            &[("certificate: chain", "warning")],
        ),
        (
            ("gw.localhost".to_owned(), "nowhere.invalid".to_owned()),
            &[("certificate: names", "failed"), names[0], names[1]],
        ),
        (more("colour = 1\n"), &[("configuration", "failed")]),
    ] {
        let found = with_configuration(&site, |text| match from.is_empty() {
            true => text + &to,
            false => text.replace(&from, &to),
        });
        found.assert_complaints(complaints);
    }
}

#[test]
fn a_certificate_that_ends_soon_or_has_ended_fails_its_check() {
    let site = Site::start();
    for (days, verdict) in [(-1, "failed"), (3, "warning")] {
        site.other_certificate(&NAMES, days);
        let found = with_configuration(&site, |text| {
            let text = text.replace("server.crt", "other.crt");
            text.replace("server.key", "other.key")
        });
        found.assert_complaints(&[("certificate: time", verdict)]);
    }
}

#[test]
fn each_listener_whose_port_another_program_has_fails_its_check() {
    let site = Site::start();
    let taken_at = taken();
    let found = with_configuration(&site, |text| {
        format!("{text}listen_http = \"{taken_at}\"\n")
    });
    found.assert_complaints(&[("listen_http", "failed")]);
    let listen = ("listen", "failed");
    let of_admin = [listen, ("admin_listen", "failed"), ("services", "warning")];
    for (variable, address, complaints) in [
        ("GW_LISTEN", &*taken_at, &[listen][..]),
        // In the next two cases, no gateway of this configuration runs.
        ("GW_ADMIN_LISTEN", &taken_at, &of_admin),
        ("GW_ADMIN_LISTEN", "127.0.0.1:0", &[listen]),
    ] {
        let found = examine(site.doctor().env(variable, address));
        found.assert_complaints(complaints);
    }
}

#[test]
fn an_admin_listener_for_other_machines_without_a_certificate_has_a_warning() {
    let site = Site::start();
    let open = format!("0.0.0.0:{}", site.served.admin_address.port());
    let found = examine(site.doctor().env("GW_ADMIN_LISTEN", open));
    found.assert_complaints(&[("admin certificate", "warning")]);
}

#[test]
fn a_removed_day_of_the_request_log_has_a_warning() {
    let site = Site::start();
    let removed = site.path("data/requests/2026-11-20.removed");
    fs::create_dir_all(removed.parent().unwrap()).unwrap();
    fs::write(&removed, "").unwrap();
    examine(&mut site.doctor()).assert_complaints(&[("request log", "warning")]);
}

#[test]
fn a_missing_file_of_a_stopped_gateway_fails_its_check() {
    let site = Site::start();
    let mut doctor = site.doctor();
    let path = site.path("data");
    let folder = site.stop();
    examine(&mut doctor).assert(&OF_NODE, &[]);
    fs::remove_file(path.join("reserve")).unwrap();
    examine(&mut doctor).assert_complaints(&[("reserve", "warning")]);
    // A file in place of the folder.
    fs::remove_dir_all(&path).unwrap();
    fs::write(&path, "").unwrap();
    examine(&mut doctor).assert_complaints(&[("data_dir", "failed")]);
    drop(folder);
}

#[test]
fn the_clock_of_a_machine_fails_its_check() {
    if !programs::usable(&["faketime"]) {
        return;
    }
    let site = Site::start();
    let at = |time: &str, command: &Command| {
        let mut faked = Command::new("faketime");
        faked.args(["-f", time]).arg(command.get_program());
        faked.args(command.get_args());
        let variables = command.get_envs();
        faked.envs(variables.filter_map(|(name, value)| Some((name, value?))));
        examine(&mut faked)
    };
    let found = at("@2001-01-01 00:00:00", &site.doctor());
    found.assert_complaints(&[("clock", "failed")]);
    site.enroll();
    let doctor = site.agent_doctor(&backend::answering(OK));
    at("+10m", &doctor).assert_complaints(&[("clock of the gateway", "failed")]);
    at("+40s", &doctor).assert_complaints(&[("clock of the gateway", "warning")]);
}

#[test]
fn each_fault_of_an_agent_fails_its_check() {
    let site = Site::start();
    site.enroll();
    let state = site.path("agent");
    let works = backend::answering(OK);
    let doctor = |backend: &str| site.agent_doctor(backend);
    let taken_at = taken();
    let broken = backend::answering(BROKEN);
    for (backend, variable, complaints) in [
        (&works, ("GW_CORE_DUMPS", "true"), ("core dumps", "warning")),
        (&works, ("GW_COLOUR", "1"), ("environment", "warning")),
        (
            &works,
            ("GW_AGENT_METRICS_LISTEN", &taken_at),
            ("metrics_listen", "failed"),
        ),
        (
            &"http://127.0.0.1:1".to_owned(),
            ("GW_STANDBY", "false"),
            (BACKEND, "failed"),
        ),
        (
            &broken,
            ("GW_HEALTH_CHECK", "/healthz"),
            (HEALTH_CHECK, "failed"),
        ),
        (&works, ("GW_STANDBY", "maybe"), ("configuration", "failed")),
    ] {
        let found = examine(doctor(backend).env(variable.0, variable.1));
        found.assert_complaints(&[complaints]);
    }
    if programs::is_root() {
        chown(&state, Some(1), None).unwrap();
        let complaint = [("owner of the state folder", "warning")];
        examine(&mut doctor(&works)).assert_complaints(&complaint);
        chown(&state, Some(0), None).unwrap();
    }
}

#[test]
fn each_loss_of_an_agent_fails_its_check() {
    let site = Site::start();
    site.enroll();
    let state = site.path("agent");
    let works = backend::answering(OK);
    let doctor = |backend: &str| site.agent_doctor(backend);
    let file = state.join("agent.json");
    let enrollment = fs::read_to_string(&file).unwrap();
    let mut changed: Value = serde_json::from_str(&enrollment).unwrap();
    changed["gateway_host"] = json!("nowhere.invalid");
    fs::write(&file, changed.to_string()).unwrap();
    examine(&mut doctor(&works)).assert_complaints(&[("gateway's name", "failed")]);
    changed["gateway_host"] = json!("127.0.0.1");
    changed["gateway_port"] = json!(1);
    fs::write(&file, changed.to_string()).unwrap();
    let away = [("gateway", "failed"), (TUNNEL, "failed")];
    examine(&mut doctor(&works)).assert_complaints(&away);
    fs::write(&file, &enrollment).unwrap();
    examine(&mut doctor(&works)).assert_complaints(&[]);

    let id = changed["agent_id"].as_str().unwrap();
    site.api().revoke_agent("demo", id);
    examine(&mut doctor(&works)).assert_complaints(&[(TUNNEL, "failed")]);
    fs::write(state.join("identity.pem"), "none").unwrap();
    examine(&mut doctor(&works)).assert_complaints(&[("identity", "failed")]);
    fs::remove_file(&file).unwrap();
    examine(&mut doctor(&works)).assert_complaints(&[("enrollment", "failed")]);
    fs::remove_dir_all(&state).unwrap();
    fs::write(&state, "").unwrap();
    let file = [("state folder", "failed"), ("enrollment", "failed")];
    examine(&mut doctor(&works)).assert_complaints(&file);
}
