//! nginx, which ends a connection of HTTP/2 with GOAWAY after `keepalive_requests`.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use super::{Bench, Figures, Missed, find, posts, wait_for_port};
use crate::failure::ensure;
use crate::machine::process::{self, Process};

const CALLERS: usize = 80;
const EACH: usize = 250;

const CONFIGURATION: &str = "
daemon off;
pid FOLDER/nginx.pid;
error_log FOLDER/nginx.err;
events { worker_connections 4096; }
http {
  client_body_temp_path FOLDER/body;
  proxy_temp_path FOLDER/proxy;
  fastcgi_temp_path FOLDER/fastcgi;
  uwsgi_temp_path FOLDER/uwsgi;
  scgi_temp_path FOLDER/scgi;
  access_log off;
  SERVERS
}
";

/// Passes requests to a server that logs each with the length of its body.
const SERVERS: &str = "
  log_format received '$request_uri $content_length';
  server {
    listen 127.0.0.1:PORT http2;
    SETTINGS
    location / { proxy_pass http://unix:FOLDER/received.sock; }
  }
  server {
    listen unix:FOLDER/received.sock backlog=4096;
    access_log FOLDER/received.log received;
    location / { return 200; }
  }
";

pub(super) fn run(bench: &Bench) -> Figures {
    let defaults = row(bench, "")?;
    let fifty = row(bench, "keepalive_requests 50;")?;
    Ok(format!("{defaults}; {fifty}"))
}

fn row(bench: &Bench, settings: &str) -> Result<String, Missed> {
    let (nginx, folder, port) = start(&SERVERS.replace("SETTINGS", settings))?;
    let pool = bench.pool(&format!("h2c://127.0.0.1:{port}"))?;
    let failures = posts::send(&pool.targets()?[0], CALLERS, EACH, |_| Default::default())?;
    let mut times: HashMap<String, usize> = HashMap::new();
    for line in fs::read_to_string(folder.join("received.log"))?.lines() {
        *times.entry(line.to_owned()).or_default() += 1;
    }
    drop(nginx);
    let again = times.values().filter(|times| **times > 1).count();
    let whole = times.keys().filter(|line| line.ends_with(" 3000")).count();
    let requests = CALLERS * EACH;
    let settings = if settings.is_empty() {
        "defaults"
    } else {
        settings.trim_end_matches(';')
    };
    let figures = format!(
        "{settings}: {requests} POSTs of 3 kB, {CALLERS} at once: failures {failures:?}, {whole} \
         whole at nginx, {again} of them more than once"
    );
    ensure(
        failures.is_empty() && whole == requests && times.len() == requests && again == 0,
        || figures.clone(),
    )?;
    Ok(figures)
}

/// Starts nginx with these servers. Returns also its folder and its port.
pub(super) fn start(servers: &str) -> Result<(Process, PathBuf, u16), Missed> {
    let mut command = process::command(&find("nginx", "nginx-light")?, &[])?;
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    let path = folder.path().to_owned();
    let [port] = process::free_ports()?;
    let configuration = CONFIGURATION
        .replace("SERVERS", servers)
        .replace("FOLDER", &path.display().to_string())
        .replace("PORT", &port.to_string());
    let file = path.join("nginx.conf");
    fs::write(&file, configuration)?;
    let nginx = Process::spawn("nginx", command.arg("-c").arg(file))?.with_folder(folder);
    wait_for_port(port)?;
    Ok((nginx, path, port))
}
