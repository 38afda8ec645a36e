//! Documents that a gateway and an agent serve, both with everything in force that has metrics of
//! its own.

use std::fs;
use std::sync::OnceLock;

use crate::support::scene::Scene;

pub(crate) struct Served {
    pub(crate) openapi: serde_json::Value,
    pub(crate) gateway_metrics: String,
    pub(crate) agent_metrics: String,
}

/// Starts both programs at the first call.
pub(crate) fn served() -> &'static Served {
    static SERVED: OnceLock<Served> = OnceLock::new();
    SERVED.get_or_init(serve)
}

fn serve() -> Served {
    let folder = tempfile::tempdir().unwrap();
    let agent_config = folder.path().join("agent.toml");
    fs::write(
        &agent_config,
        "backend = 'http://127.0.0.1:9'\nmetrics_listen = '127.0.0.1:0'\n",
    )
    .unwrap();
    let scene = Scene::service()
        .agent_with(agent_config)
        .traces("http://127.0.0.1:9", 0.0)
        .start();
    let admin = &scene.about.admin_url;
    let agent = scene.agent_metrics_address().unwrap();
    let served = Served {
        openapi: serde_json::from_str(&fetch(&format!("{admin}/api/v1/openapi.json"))).unwrap(),
        gateway_metrics: fetch(&format!("{admin}/metrics")),
        agent_metrics: fetch(&format!("http://{agent}/metrics")),
    };
    scene.stop();
    served
}

/// The body of a response.
fn fetch(url: &str) -> String {
    ureq::get(url)
        .call()
        .unwrap()
        .body_mut()
        .read_to_string()
        .unwrap()
}
