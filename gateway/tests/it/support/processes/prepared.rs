//! A prepared data folder, from which tests start gateway and agent processes.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::process::{self, Running, Served, config_text, gw_agent};
use crate::support::admin_api::Api;
use crate::support::agents::in_process;
use crate::support::agents::modified_agent::{self, Tunnel};
use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::scene::{About, Scene};

/// A data folder with the scene's account, service, key and agent. No process is running.
pub(crate) struct Prepared {
    directory: tempfile::TempDir,
    service_key: String,
}

impl Prepared {
    pub(crate) fn new() -> Self {
        Self::with_agents(&["agent"])
    }

    /// Creates one agent of the service for each of `names`, with its state in a folder of that
    /// name.
    pub(crate) fn with_agents(names: &[&str]) -> Self {
        Scene::service().enrolled(names).prepare()
    }

    /// The folder of a scene that has ended.
    pub(crate) fn of(directory: tempfile::TempDir, service_key: String) -> Self {
        Self {
            directory,
            service_key,
        }
    }

    pub(crate) fn service_key(&self) -> &str {
        &self.service_key
    }

    /// The id of the service key.
    pub(crate) fn key_id(&self) -> &str {
        self.service_key
            .trim_start_matches("gw_sk_")
            .split('.')
            .next()
            .unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts `gw-gateway serve` on `port` and returns its address once it listens.
    pub(crate) fn serve(&self, port: u16) -> (Running, SocketAddr) {
        let served = self.serve_with(&config_text(&self.path("data"), port));
        (served.process, served.address)
    }

    /// Starts the gateway on a free port and the agent in front of `backend`, and waits for the
    /// tunnel.
    pub(crate) fn start(&self, backend: &str) -> (Served, Running) {
        let served = self.serve_with(&self.config());
        let agent = self.run_agent(served.address.port(), backend);
        self.wait_for_tunnel(served.address);
        (served, agent)
    }

    /// The configuration of a gateway on a free port.
    pub(crate) fn config(&self) -> String {
        config_text(&self.path("data"), 0)
    }

    /// Starts `gw-gateway serve` with this configuration.
    pub(crate) fn serve_with(&self, config: &str) -> Served {
        fs::write(self.path("gateway.toml"), config).unwrap();
        process::serve(&mut process::serve_command(&self.path("gateway.toml")))
    }

    /// Sets the gateway port in the agent's state to `port` and starts the agent.
    pub(crate) fn run_agent(&self, port: u16, backend: &str) -> Running {
        self.run_agent_of("agent", port, backend)
    }

    /// Sets the gateway port in the agent's state.
    pub(crate) fn set_agent_port(&self, port: u16) {
        self.set_port_of("agent", port);
    }

    pub(crate) fn set_port_of(&self, name: &str, port: u16) {
        let path = self.path(name).join("agent.json");
        let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        state["gateway_port"] = port.into();
        fs::write(&path, state.to_string()).unwrap();
    }

    /// Like [`Self::run_agent`], for the agent of this name.
    pub(crate) fn run_agent_of(&self, name: &str, port: u16, backend: &str) -> Running {
        let mut command = self.agent_command(name, port, backend);
        Running::new(command.stderr(Stdio::null()).spawn().unwrap())
    }

    /// `gw-agent run` of the agent of this name, with `port` as the gateway's.
    pub(crate) fn agent_command(&self, name: &str, port: u16, backend: &str) -> Command {
        self.set_port_of(name, port);
        let mut command = gw_agent();
        command
            .arg("run")
            .arg("--state-dir")
            .arg(self.path(name))
            .args(["--backend", backend]);
        command
    }

    /// The administration API of a gateway with this data folder.
    pub(crate) fn api(&self, admin_address: SocketAddr) -> Api {
        let token = fs::read_to_string(self.path("data/admin.token")).unwrap();
        Api::at(admin_address, &token)
    }

    pub(crate) fn about(&self, address: SocketAddr) -> About {
        about(address, &self.service_key, self.path("data/dev-ca.crt"))
    }

    pub(crate) fn connect(&self, address: SocketAddr) -> Caller {
        connect_to(&self.about(address), HOST, &[b"http/1.1"], None)
    }

    /// An upgraded connection of the agent of this name, on which it has sent no frame.
    pub(crate) fn upgraded(&self, name: &str, address: SocketAddr) -> Tunnel {
        upgraded(&self.about(address), &self.path(name))
    }

    pub(crate) fn get(&self, target: &str) -> String {
        format!(
            "GET {target} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {}\r\n\r\n",
            self.service_key
        )
    }

    pub(crate) fn wait_for_tunnel(&self, address: SocketAddr) {
        eventually("requests are answered", || {
            let mut caller = self.connect(address);
            caller.send(self.get("/"));
            (caller.response().status == 200).then_some(())
        });
    }
}

/// An upgraded connection of the agent with this state folder, on which it has sent no frame.
pub(crate) fn upgraded(about: &About, state_dir: &Path) -> Tunnel {
    let identity = in_process::identity(state_dir);
    Tunnel::upgrade(modified_agent::connection(about, HOST, identity), HOST)
}

/// How to reach the scene's service at a gateway.
pub(crate) fn about(address: SocketAddr, service_key: &str, ca_file: PathBuf) -> About {
    About {
        base_url: format!("https://eu1.gw.localhost:{}", address.port()),
        tenant_url: format!("https://{HOST}:{}", address.port()),
        account: "demo",
        service: "echo",
        client_id: String::new(),
        client_secret: String::new(),
        service_key: service_key.to_owned(),
        ca_file,
        admin_url: String::new(),
        console_url: String::new(),
        admin_token: String::new(),
        backend: None,
    }
}
