//! HTTP/2 backends that end connections and refuse requests: what they have not processed is sent
//! again (RFC 9113 §8.7).

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::support::eventually;
use crate::support::peers::http2_backend;
use crate::support::processes::process::Running;
use crate::support::programs::usable;
use crate::support::scene::Scene;

/// Takes 8 requests on a connection, half of those that are sent at once, and passes them to a
/// server that logs each with the length of its body.
const CONFIGURATION: &str = "
daemon off;
master_process off;
pid FOLDER/nginx.pid;
error_log FOLDER/nginx.err info;
events { worker_connections 1024; }
http {
  client_body_temp_path FOLDER/body;
  proxy_temp_path FOLDER/proxy;
  fastcgi_temp_path FOLDER/fastcgi;
  uwsgi_temp_path FOLDER/uwsgi;
  scgi_temp_path FOLDER/scgi;
  log_format received '$request_uri $content_length';
  access_log off;
  server {
    listen ADDRESS http2;
    keepalive_requests 8;
    location / { proxy_pass http://unix:FOLDER/received.sock; }
  }
  server {
    listen unix:FOLDER/received.sock;
    access_log FOLDER/received.log received;
    location / { return 200; }
  }
}
";

const CALLERS: usize = 16;
const REQUESTS: usize = 40;

#[test]
fn each_post_arrives_once_at_an_nginx_that_ends_connections() {
    if !usable(&["nginx"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display().to_string();
    let (port, _held) = gw_local_region::hold(0).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let configuration = CONFIGURATION
        .replace("FOLDER", &path)
        .replace("ADDRESS", &address.to_string());
    fs::write(folder.path().join("nginx.conf"), configuration).unwrap();
    let mut nginx = Command::new("nginx");
    nginx
        .args(["-c", &format!("{path}/nginx.conf")])
        .stderr(Stdio::null());
    let _nginx = Running::new(nginx.spawn().unwrap());
    eventually("nginx accepts connections", || {
        TcpStream::connect(address).ok()
    });

    let scene = Scene::service()
        .agent_to(format!("h2c://{address}"))
        .start();
    let body = "x".repeat(3000);
    thread::scope(|scope| {
        for number in 0..CALLERS {
            let (scene, body) = (&scene, &body);
            scope.spawn(move || {
                let mut caller = scene.connect();
                for turn in 0..REQUESTS {
                    let line = format!("POST /{number}/{turn}");
                    let rest = format!("Content-Length: {}\r\n\r\n{body}", body.len());
                    caller.send(scene.request(&line, &rest));
                    assert_eq!(caller.response().status, 200, "{line}");
                }
            });
        }
    });
    let received = eventually("nginx has logged all requests", || {
        let log = fs::read_to_string(folder.path().join("received.log")).unwrap();
        (log.lines().count() >= CALLERS * REQUESTS).then_some(log)
    });
    let mut times = BTreeMap::new();
    for line in received.lines() {
        assert!(line.ends_with(" 3000"), "{line}");
        *times.entry(line).or_insert(0) += 1;
    }
    assert!(times.values().all(|times| *times == 1));
    assert_eq!(times.len(), CALLERS * REQUESTS);
}

#[test]
fn a_request_that_a_backend_keeps_refusing_goes_to_another_agent() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let refused = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&refused);
    let refusing = http2_backend::start(async move |_, mut respond| {
        counted.fetch_add(1, Ordering::Relaxed);
        respond.send_reset(h2::Reason::REFUSED_STREAM);
    });
    let _one = scene.run("one", 16, &refusing);
    let _two = scene.run("two", 16, &http2_backend::http2());
    let mut caller = scene.connect();
    let mut requests = 0;
    while refused.load(Ordering::Relaxed) == 0 {
        requests += 1;
        assert!(requests < 1000, "no request went to the first agent");
        caller.send(scene.request("POST /", "Content-Length: 3\r\n\r\nabc"));
        let response = caller.response();
        let text = String::from_utf8_lossy(&response.body);
        assert!(response.status == 200 && text.ends_with("/ 3 0"), "{text}");
    }
    assert_eq!(refused.load(Ordering::Relaxed), 6);
}
