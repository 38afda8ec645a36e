//! Agents without a volume: each process is an agent of its own. The unit tests of the control
//! plane show that it is deleted an hour after it has ended.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};

use serde_json::json;
use tempfile::TempDir;

use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, connect_to};
use crate::support::processes::process::{Running, gw_agent, start_logged};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually};

const HOST: &str = "acme--api.eu1.gw.localhost";

/// A service, its key, and what pods mount: the token and the configuration.
struct Deployment {
    scene: Scene,
    key: String,
    folder: TempDir,
}

impl Deployment {
    fn new() -> Self {
        let scene = Scene::service().agent().start();
        let api = scene.api();
        api.create_service("acme", "api");
        let (_, key) = api.create_service_key("acme", &["api"]);
        let new = json!({ "services": ["api"], "uses": 100, "ephemeral": true });
        let created = api.post("/accounts/acme/enrollment-tokens", &new);
        let token = created["token"].as_str().unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), token).unwrap();
        Self { scene, key, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command of a pod with an empty volume: that of packaging/kubernetes/agent-replicas.
    fn pod(&self, name: &str, backend: &str) -> Command {
        let config = self.path(&format!("{name}.toml"));
        let state = self.path(name);
        fs::write(&config, format!("backend = \"{backend}\"\n")).unwrap();
        fs::create_dir(&state).unwrap();
        let mut command = gw_agent();
        command.args(["run", "--config"]).arg(config);
        command.arg("--state-dir").arg(state).stdin(Stdio::null());
        command.env_remove("GW_ENROLLMENT_TOKEN");
        command
    }

    /// Starts a pod, which enrolls.
    fn start_pod(&self, name: &str, backend: &str) -> Running {
        let mut pod = self.pod(name, backend);
        pod.args(["--gateway", &self.scene.about.base_url]);
        pod.arg("--token-file").arg(self.path("token"));
        pod.arg("--ca-file").arg(&self.scene.about.ca_file);
        Running::new(pod.spawn().unwrap())
    }

    fn request(&self) -> Caller {
        let mut caller = connect_to(&self.scene.about, HOST, &[b"http/1.1"], None);
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {}\r\n\r\n",
            self.key
        ));
        caller
    }

    /// Ids of the agents that have a tunnel of the service.
    fn connected(&self) -> BTreeSet<String> {
        let mut tunnels = self.scene.tunnels();
        tunnels.retain(|tunnel| tunnel.service == "acme--api");
        tunnels.into_iter().map(|tunnel| tunnel.agent_id).collect()
    }

    fn wait_for_tunnels(&self, count: usize) -> BTreeSet<String> {
        eventually("the agents have their tunnels", || {
            Some(self.connected()).filter(|it| it.len() == count)
        })
    }

    /// Ids of the agents in the list of the administration.
    fn listed(&self) -> BTreeSet<String> {
        let agents = self.scene.api().agents("acme");
        let ids = agents.iter().map(|agent| {
            assert_eq!(agent["ephemeral"], true, "{agent}");
            agent["agent_id"].as_str().unwrap().to_owned()
        });
        ids.collect()
    }
}

/// Number of requests at each backend, and whether they are answered.
#[derive(Default)]
struct Held {
    requests: [usize; 3],
    released: bool,
}

/// Starts a backend that counts its requests at `number`, and holds them until they are released.
fn holding_backend(held: Arc<(Mutex<Held>, Condvar)>, number: usize) -> String {
    backend::start(move |mut peer| {
        let (held, changed) = &*held;
        while peer.request().is_ok() {
            held.lock().unwrap().requests[number] += 1;
            changed.notify_all();
            let known = held.lock().unwrap();
            drop(changed.wait_while(known, |held| !held.released).unwrap());
            peer.send("HTTP/1.1 204 X\r\n\r\n");
        }
    })
}

#[test]
fn three_replicas_relay_and_end_in_order() {
    let it = Deployment::new();
    let held = Arc::new((Mutex::new(Held::default()), Condvar::new()));
    let mut pods: Vec<Running> = (0..3)
        .map(|number| {
            let backend = holding_backend(Arc::clone(&held), number);
            it.start_pod(&format!("pod-{number}"), &backend)
        })
        .collect();
    let agents = it.wait_for_tunnels(3);
    assert_eq!(it.listed(), agents);

    // Requests are sent until each agent has one. None is answered before.
    let mut callers = Vec::new();
    let (held, changed) = &*held;
    let requests = || held.lock().unwrap().requests;
    while requests().contains(&0) {
        assert!(callers.len() < 200, "idle agents: {:?}", requests());
        callers.push(it.request());
        let is_missing = |held: &mut Held| held.requests.iter().sum::<usize>() < callers.len();
        let waited = changed.wait_timeout_while(held.lock().unwrap(), SOON, is_missing);
        assert!(!waited.unwrap().1.timed_out(), "a request did not arrive");
    }
    held.lock().unwrap().released = true;
    changed.notify_all();
    for mut caller in callers {
        assert_eq!(caller.response().status, 204);
    }

    pods.iter_mut().for_each(Running::stop);
    it.wait_for_tunnels(0);
    assert_eq!(it.listed(), agents);
}

#[test]
fn a_replica_whose_record_was_deleted_enrolls_again_with_its_token() {
    let it = Deployment::new();
    let backend = backend::answering("HTTP/1.1 204 X\r\n\r\n");
    let mut pod = it.start_pod("pod", &backend);
    let before = it.wait_for_tunnels(1);
    let api = it.scene.api();
    // The gateway does the same with an agent that has been away for an hour.
    api.delete_agent("acme", before.first().unwrap());
    let after = eventually("the agent has a new record and a tunnel", || {
        Some(it.connected()).filter(|connected| connected.len() == 1 && *connected != before)
    });
    assert_eq!(it.listed(), after);
    assert_eq!(it.request().response().status, 204);
    // The program has started itself again. A second deletion has the same effect.
    api.delete_agent("acme", after.first().unwrap());
    eventually("the agent has another record and a tunnel", || {
        Some(it.connected()).filter(|connected| connected.len() == 1 && *connected != after)
    });
    // The process that the service manager started is still the same.
    pod.stop();
}

#[test]
fn an_agent_without_a_token_whose_record_was_deleted_says_what_to_do() {
    let it = Deployment::new();
    let backend = backend::answering("HTTP/1.1 204 X\r\n\r\n");
    let mut command = it.pod("pod", &backend);
    let agent = it.scene.enroll("acme", &["api"], &it.path("pod"));
    let (mut pod, log) = start_logged(&mut command);
    it.wait_for_tunnels(1);
    it.scene.api().delete_agent("acme", &agent);
    let line = log.line_with("the gateway does not know this agent");
    for part in ["gw-agent enroll --force", "ERROR"] {
        assert!(line.contains(part), "{line}");
    }
    pod.stop();
}
