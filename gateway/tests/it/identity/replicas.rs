//! Agents without a volume: each process is an agent of its own, and is deleted an hour after it
//! has ended.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};

use gw_base::clock::Timestamp;
use gw_control_plane::control::changes::audit;
use gw_control_plane::control::records::{agent, enrollment_token, ephemeral_agents};
use gw_control_plane::control::{Actor, Control, NewEnrollmentToken};
use gw_gateway::demo::Demo;
use gw_shared::id::AgentId;
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_store::{AgentRecord, AuditQuery, StoredRecord};
use serde_json::json;
use tempfile::TempDir;

use crate::support::admin_api::Api;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, connect_to};
use crate::support::processes::process::{Running, gw_agent, start_logged};
use crate::support::{SOON, demo, eventually, setup, tunnels};

const HOST: &str = "acme--api.eu1.gw.localhost";
const NOON: i64 = 1_800_000_000;
const HOUR: i64 = 3600;

/// A service, its key, and what pods mount: the token and the configuration.
struct Deployment {
    demo: Demo,
    key: String,
    folder: TempDir,
}

impl Deployment {
    fn new() -> Self {
        let demo = demo(None);
        let control = demo.gateway().control();
        setup::service(control, "acme", "api");
        let (_, key) = setup::service_key(control, "acme", &["api"]);
        let new = NewEnrollmentToken {
            services: vec!["api".to_owned()],
            uses: Some(100),
            ephemeral: true,
            ..NewEnrollmentToken::default()
        };
        let token = enrollment_token::create(control, &Actor::Admin, "acme", &new)
            .unwrap()
            .token;
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), token).unwrap();
        Self { demo, key, folder }
    }

    fn control(&self) -> &Control {
        self.demo.gateway().control()
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
        command
            .arg("run")
            .arg("--config")
            .arg(config)
            .arg("--state-dir")
            .arg(state)
            .stdin(Stdio::null());
        command.env_remove("GW_ENROLLMENT_TOKEN");
        command
    }

    /// Adds the options with which a pod enrolls.
    fn with_token<'a>(&self, pod: &'a mut Command) -> &'a mut Command {
        pod.args(["--gateway", &self.demo.about.base_url])
            .arg("--token-file")
            .arg(self.path("token"));
        pod.arg("--ca-file").arg(&self.demo.about.ca_file)
    }

    fn request(&self) -> Caller {
        let mut caller = connect_to(&self.demo.about, HOST, &[b"http/1.1"], None);
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {}\r\n\r\n",
            self.key
        ));
        caller
    }

    /// Ids of the agents that have a tunnel of the service.
    fn connected(&self) -> BTreeSet<String> {
        let of_service = tunnels(&self.demo)
            .into_iter()
            .filter(|tunnel| tunnel.service == "acme--api");
        of_service.map(|tunnel| tunnel.agent_id).collect()
    }

    fn wait_for_tunnels(&self, count: usize) -> BTreeSet<String> {
        eventually("the agents have their tunnels", || {
            Some(self.connected()).filter(|it| it.len() == count)
        })
    }

    /// Ids of the agents in the list of the administration.
    fn listed(&self) -> BTreeSet<String> {
        let page = Api(&self.demo.about).get("/accounts/acme/agents").body;
        let agents = page["items"].as_array().unwrap();
        assert!(
            agents.iter().all(|agent| agent["ephemeral"] == true),
            "{page}"
        );
        agents
            .iter()
            .map(|agent| agent["agent_id"].as_str().unwrap().to_owned())
            .collect()
    }

    /// What the job does at `now`.
    fn sweep(&self, now: i64) {
        sweep(self.control(), &self.connected(), now);
    }
}

fn sweep(control: &Control, connected: &BTreeSet<String>, now: i64) {
    ephemeral_agents::note_absent(control, connected, Timestamp(now)).unwrap();
    ephemeral_agents::delete_absent(control, connected, Timestamp(now)).unwrap();
}

/// How many requests each backend has got, and whether they are answered.
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
            drop(
                changed
                    .wait_while(held.lock().unwrap(), |held| !held.released)
                    .unwrap(),
            );
            peer.send("HTTP/1.1 204 X\r\n\r\n");
        }
    })
}

#[test]
fn three_replicas_relay_and_are_gone_an_hour_after_they_have_ended() {
    let it = Deployment::new();
    let held = Arc::new((Mutex::new(Held::default()), Condvar::new()));
    let mut pods: Vec<Running> = (0..3)
        .map(|number| {
            let backend = holding_backend(Arc::clone(&held), number);
            Running::new(
                it.with_token(&mut it.pod(&format!("pod-{number}"), &backend))
                    .spawn()
                    .unwrap(),
            )
        })
        .collect();
    let agents = it.wait_for_tunnels(3);
    assert_eq!(it.listed(), agents);

    // Until each of them has a request; no request ends before.
    let mut callers = Vec::new();
    while held.0.lock().unwrap().requests.contains(&0) {
        assert!(
            callers.len() < 200,
            "some agents get no requests: {:?}",
            held.0.lock().unwrap().requests
        );
        callers.push(it.request());
        let arrived = |held: &mut Held| held.requests.iter().sum::<usize>() < callers.len();
        let waited = held
            .1
            .wait_timeout_while(held.0.lock().unwrap(), SOON, arrived)
            .unwrap()
            .1;
        assert!(!waited.timed_out(), "a request did not arrive");
    }
    held.0.lock().unwrap().released = true;
    held.1.notify_all();
    assert!(
        callers
            .into_iter()
            .all(|mut caller| caller.response().status == 204)
    );

    // While they are connected, time does not matter.
    it.sweep(NOON);
    it.sweep(NOON + 5 * HOUR);
    assert_eq!(it.listed(), agents);

    for pod in &mut pods {
        pod.signal("TERM");
        assert_eq!(pod.exit_code(), Some(0));
    }
    it.wait_for_tunnels(0);
    let ended = NOON + 6 * HOUR;
    for (now, left) in [(ended, 3), (ended + HOUR - 1, 3), (ended + HOUR, 0)] {
        it.sweep(now);
        assert_eq!(it.listed().len(), left, "at {now}");
    }
    let log = Api(&it.demo.about)
        .get("/audit-log?account=acme&limit=1")
        .body;
    let entry = &log["items"][0];
    assert_eq!(
        (&entry["action"], &entry["actor"]),
        (&json!("agent.expire"), &json!("gateway"))
    );
    assert_eq!(entry["detail"]["agents"], json!(agents));
}

#[test]
fn a_replica_whose_record_was_deleted_enrolls_again_with_its_token() {
    let it = Deployment::new();
    let backend = backend::answering("HTTP/1.1 204 X\r\n\r\n");
    let mut pod = Running::new(it.with_token(&mut it.pod("pod", &backend)).spawn().unwrap());
    let before = it.wait_for_tunnels(1);
    // As if its machine had been away for an hour.
    sweep(it.control(), &BTreeSet::new(), NOON);
    sweep(it.control(), &BTreeSet::new(), NOON + HOUR);

    let after = eventually("the agent has a new record and a tunnel", || {
        Some(it.connected()).filter(|connected| connected.len() == 1 && *connected != before)
    });
    assert_eq!(it.listed(), after);
    assert_eq!(it.request().response().status, 204);
    // The program has started itself again. A second deletion has the same effect.
    agent::delete(it.control(), &Actor::Admin, "acme", after.first().unwrap()).unwrap();
    eventually("the agent has another record and a tunnel", || {
        Some(it.connected()).filter(|connected| connected.len() == 1 && *connected != after)
    });
    // It is still the same process for its service manager.
    pod.signal("TERM");
    assert_eq!(pod.exit_code(), Some(0));
}

#[test]
fn an_agent_without_a_token_whose_record_was_deleted_says_what_to_do() {
    let it = Deployment::new();
    let backend = backend::answering("HTTP/1.1 204 X\r\n\r\n");
    let mut command = it.pod("pod", &backend);
    let agent = setup::agent(
        it.control(),
        "acme",
        &["api"],
        it.demo.gateway().address().port(),
        &it.demo.about.ca_file,
        &it.path("pod"),
    );
    let (mut pod, log) = start_logged(&mut command);
    it.wait_for_tunnels(1);
    agent::delete(it.control(), &Actor::Admin, "acme", agent.as_str()).unwrap();
    let line = log.line_with("the gateway does not know this agent");
    assert!(
        line.contains("gw-agent enroll --force") && line.contains("ERROR"),
        "{line}"
    );
    pod.signal("TERM");
    assert_eq!(pod.exit_code(), Some(0));
}

/// The number of entries of the audit log about agents that are absent.
fn noted_absences(control: &Control) -> usize {
    let query = AuditQuery {
        account: None,
        before: None,
        limit: 100,
    };
    let log = audit::list(control, &query).unwrap().items;
    let notes = log
        .iter()
        .filter(|entry| entry.action == "agent.note_absence");
    notes.count()
}

#[test]
fn only_approved_ephemeral_agents_without_a_tunnel_are_deleted() {
    let demo = demo(None);
    let control = demo.gateway().control();
    let model = control.records().agents.into_values().next().unwrap();
    let put = |change: fn(&mut AgentRecord)| {
        let mut agent = AgentRecord {
            id: AgentId::random(),
            ephemeral: true,
            ..model.clone()
        };
        change(&mut agent);
        let id = agent.id.to_string();
        control.put(&StoredRecord::Agent(agent)).unwrap();
        id
    };
    let absent = put(|_| {});
    let returning = put(|_| {});
    let before_the_clock_was_set_back =
        put(|agent| agent.absent_since = Some(Timestamp(NOON + 9 * HOUR)));
    let kept = [
        put(|agent| agent.ephemeral = false),
        put(|agent| agent.status = EnrollmentStatus::Revoked),
        put(|agent| agent.status = EnrollmentStatus::Pending),
        model.id.to_string(),
    ];
    let exist = || -> BTreeSet<String> {
        control
            .records()
            .agents
            .into_keys()
            .map(|id| id.to_string())
            .collect()
    };
    let notes = || noted_absences(control);

    let connected = BTreeSet::from([returning.clone()]);
    sweep(control, &BTreeSet::new(), NOON);
    sweep(control, &connected, NOON + HOUR - 1);
    assert_eq!(exist().len(), 7);
    sweep(control, &connected, NOON + HOUR);
    let left = exist();
    assert!(
        !left.contains(&absent) && !left.contains(&before_the_clock_was_set_back),
        "{left:?}"
    );

    // The hour of an agent that came back begins again, and nothing is written while nothing
    // changes.
    let noted = NOON + 2 * HOUR;
    sweep(control, &BTreeSet::new(), noted);
    let noted_before = notes();
    sweep(control, &BTreeSet::new(), noted + HOUR - 1);
    assert_eq!(
        (notes(), exist().contains(&returning)),
        (noted_before, true)
    );
    sweep(control, &BTreeSet::new(), noted + HOUR);
    assert_eq!(exist(), BTreeSet::from(kept));
}
