//! `gw-gateway demo --nodes`: a region of processes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::admin_api::Api;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::processes::postgres::Postgres;
use crate::support::processes::prepared::about;
use crate::support::processes::process::{Running, gw_gateway, send_signal, start_demo};
use crate::support::{eventually, programs};

/// A demo with its process, and what it printed.
struct Nodes {
    process: Running,
    about: Value,
}

impl Nodes {
    /// `command` is `gw-gateway demo` with other options.
    fn start(count: usize, command: &mut Command) -> Self {
        let (process, about) = start_demo(command.args(["--nodes", &count.to_string()]));
        assert_eq!(about["nodes"].as_array().unwrap().len(), count);
        Self { process, about }
    }

    fn text(&self, name: &str) -> &str {
        self.about[name].as_str().unwrap()
    }

    fn pid(&self, node: usize) -> u32 {
        let pid = self.about["nodes"][node]["pid"].as_u64();
        pid.unwrap().try_into().unwrap()
    }

    fn has_tunnel(&self, node: usize) -> bool {
        let url = self.about["nodes"][node]["admin_url"].as_str().unwrap();
        let address = url.trim_start_matches("http://").parse().unwrap();
        Api::at(address, "").metrics().count("gw_tunnels") == 1
    }

    /// The status of a request at `node`.
    fn request(&self, node: usize) -> u16 {
        let address = format!("127.0.0.1:{}", self.about["nodes"][node]["port"]);
        let key = self.text("service_key");
        let about = about(address.parse().unwrap(), key, self.text("ca_file").into());
        let request =
            format!("GET /hello HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n");
        let response = connect_to(&about, HOST, &[b"http/1.1"], None).ask(request);
        response.status.as_u16()
    }

    /// Waits until every node has served a request.
    fn wait_until_served(&self) {
        let nodes = self.about["nodes"].as_array().unwrap();
        for node in 0..nodes.len() {
            eventually("the node serves", || {
                (self.request(node) == 200).then_some(())
            });
        }
    }

    /// The processes that the demo has started.
    fn parts(&self) -> Vec<u32> {
        let parent = self.process.id();
        let processes = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        processes
            .filter(|id| parent_of(*id) == Some(parent))
            .collect()
    }
}

fn demo_command() -> Command {
    let mut command = gw_gateway();
    command.arg("demo");
    command
}

/// The parent of a process (proc_pid_stat(5)); `None` if there is no such process.
fn parent_of(id: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

fn exists(id: &u32) -> bool {
    Path::new(&format!("/proc/{id}")).exists()
}

/// A folder that the user of PostgreSQL can enter, which is not this one if this one is root.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Exit code and error of a demo that does not start.
fn refusal(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(printed, "");
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn every_node_serves_and_the_others_go_on_without_one() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let folder = folder();
    let log = folder.path().join("log");
    let mut demo = Nodes::start(3, demo_command().stderr(fs::File::create(&log).unwrap()));
    demo.wait_until_served();
    assert_eq!([0, 1, 2].map(|node| demo.request(node)), [200; 3]);
    assert!(
        demo.text("store").starts_with("postgres://gw@%2F"),
        "{}",
        demo.about
    );
    assert_eq!(demo.text("admin_url"), demo.about["nodes"][0]["admin_url"]);
    let parts = demo.parts();
    assert_eq!(parts.len(), 5, "three nodes, the agent and PostgreSQL");
    assert!((0..3).all(|node| parts.contains(&demo.pid(node))));

    let lost = (0..3).find(|node| demo.has_tunnel(*node)).unwrap();
    assert!(send_signal(demo.pid(lost), "KILL"));
    for other in (0..3).filter(|node| *node != lost) {
        // A request that is sent before the loss is known may have reached the agent, and fails.
        eventually("the other nodes serve", || {
            (demo.request(other) == 200).then_some(())
        });
    }
    let line = format!(
        "node {} has ended (signal: 9 (SIGKILL)): the other nodes go on",
        lost + 1
    );
    eventually("the loss is logged", || {
        fs::read_to_string(&log)
            .unwrap()
            .contains(&line)
            .then_some(())
    });

    demo.process.signal("TERM");
    let code = demo.process.exit_code();
    assert_eq!(code, Some(0), "{}", fs::read_to_string(&log).unwrap());
    assert!(!parts.iter().any(exists), "all processes have ended");
    assert!(
        !Path::new(demo.text("ca_file")).exists(),
        "the temporary folder is removed"
    );
}

#[test]
fn the_parts_of_a_killed_demo_end_and_another_demo_goes_on_with_its_folder() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let folder = folder();
    let data = folder.path().join("data");
    let mut demo = Nodes::start(3, demo_command().arg("--data-dir").arg(&data));
    let parts = demo.parts();
    assert_eq!(parts.len(), 5);
    demo.process.signal("KILL");
    assert_eq!(demo.process.exit_code(), None);
    eventually("all processes have ended", || {
        (!parts.iter().any(exists)).then_some(())
    });

    let mut demo = Nodes::start(2, demo_command().arg("--data-dir").arg(&data));
    assert_eq!([0, 1].map(|node| demo.request(node)), [200; 2]);
    demo.process.stop();
    assert!(data.join("node-1.log").exists(), "a given folder stays");
}

#[test]
fn a_given_database_is_used() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let postgres = Postgres::start();
    let mut demo = Nodes::start(2, demo_command().args(["--store", &postgres.url()]));
    assert_eq!([0, 1].map(|node| demo.request(node)), [200; 2]);
    assert_eq!(demo.text("store"), postgres.url());
    assert_eq!(demo.parts().len(), 3, "two nodes and the agent");
    demo.process.stop();
    let name = postgres.sql("SELECT name FROM gw.region");
    assert_eq!(name, "eu1.gw.localhost");

    let mut again = demo_command();
    again.args(["--nodes", "2", "--port", "0", "--admin-port", "0"]);
    let (code, error) = refusal(again.args(["--store", &postgres.url()]));
    assert_eq!(code, Some(1));
    for part in [
        "--store postgres://gw@",
        "holds the region eu1.gw.localhost already",
        "give the --data-dir",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_machine_without_postgresql_is_told_what_to_install() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    const WITHOUT: &str = "[ ! -d /usr/lib/postgresql ] || mount -t tmpfs none \
                           /usr/lib/postgresql; PATH= exec \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .args([WITHOUT, "sh"])
        .arg(gw_gateway().get_program())
        .args(["demo", "--nodes", "3", "--port", "0", "--admin-port", "0"]);
    let (code, error) = refusal(&mut command);
    assert_eq!(code, Some(1), "{error}");
    for part in [
        "PostgreSQL, which the nodes share, is not installed",
        "`apt install postgresql`",
        "--store postgres://",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn options_that_do_not_fit_together_are_refused_with_both_names() {
    for (options, parts) in [
        (
            "--store postgres://gw@db1/gw",
            ["--store", "only with --nodes"],
        ),
        ("--nodes 3 --store sqlite", ["--store", "--nodes"]),
        ("--nodes 3 --port 65535", ["--port 65535", "--nodes 3"]),
        (
            "--nodes 3 --port 8443 --admin-port 8445",
            ["--port 8443 and --admin-port 8445", "--nodes 3"],
        ),
        (
            "--nodes 2 --backend ftp://localhost",
            ["--backend", "\"ftp://localhost\""],
        ),
        ("--nodes 1", ["--nodes", "1 is not in 2..=9"]),
    ] {
        let (code, error) = refusal(demo_command().args(options.split(' ')));
        assert_eq!(code, Some(2), "{error}");
        assert!(
            parts.iter().all(|part| error.contains(part)),
            "{options}: {error}"
        );
    }
}
