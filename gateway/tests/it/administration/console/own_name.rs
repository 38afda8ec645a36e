//! The console's own name: the session of a browser does not reach servers on other ports of the
//! machine.

use std::path::Path;
use std::process::Command;
use std::sync::mpsc;

use crate::support::peers::backend;
use crate::support::scene::Scene;
use crate::support::{SOON, programs};

/// Runs curl with the cookies of a browser. Returns its standard output.
fn curl(jar: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new("curl");
    command
        .args(["--silent", "--show-error", "--noproxy", "*", "--cookie"])
        .arg(jar)
        .arg("--cookie-jar")
        .arg(jar);
    let output = command.args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let (_, rest) = text
        .split_once(before)
        .unwrap_or_else(|| panic!("no {before}: {text}"));
    rest.split_once(after).unwrap().0
}

/// Signs in at the printed address. Returns the page that follows, and its address in the last
/// line.
fn sign_in(jar: &Path, console: &str, admin_token: &str) -> String {
    let form = curl(jar, &[&format!("{console}sign-in")]);
    assert!(
        !form.contains("your browser finds it"),
        "the address has a name of its own"
    );
    let form_token = format!(
        "form_token={}",
        between(&form, "name=\"form_token\" value=\"", "\"")
    );
    let token = format!("token={admin_token}");
    let fields = [
        "--data-urlencode",
        &form_token,
        "--data-urlencode",
        &token,
        "--data-urlencode",
        "next=/tunnels",
    ];
    let follow = [
        "--location",
        "--write-out",
        "\n%{url_effective}",
        &format!("{console}sign-in"),
    ];
    curl(jar, &[&fields[..], &follow].concat())
}

#[test]
fn a_server_on_another_port_of_this_machine_does_not_get_the_session() {
    if !programs::usable(&["curl"]) {
        return;
    }
    let scene = Scene::service().agent().start();
    let folder = tempfile::tempdir().unwrap();
    let console = format!(
        "http://console.gw.localhost:{}/",
        scene.admin_address().port()
    );
    let jar = folder.path().join("cookies");
    let (seen, cookies) = mpsc::channel();
    let thief = backend::start(move |mut peer| {
        while let Ok((head, ..)) = peer.request() {
            let cookie = head
                .headers
                .get("cookie")
                .map_or("", |value| value.to_str().unwrap());
            seen.send(cookie.to_owned()).unwrap();
            peer.send("HTTP/1.1 204 X\r\n\r\n");
        }
    });
    let port = thief.rsplit(':').next().unwrap();
    let stolen_at = |host: &str| {
        curl(&jar, &[&format!("http://{host}:{port}/")]);
        cookies.recv_timeout(SOON).unwrap()
    };

    let page = sign_in(&jar, &console, &scene.about.admin_token);
    assert!(page.contains("<h1>Live tunnels"), "{page}");
    let (_, address) = page.rsplit_once('\n').unwrap();
    let host = between(address, "http://", ":");
    assert!(
        host.ends_with(".console.gw.localhost") && address.ends_with("/tunnels"),
        "{address}"
    );

    // The names of the machine, the address that was printed, and one that the other server could
    // guess.
    for host in [
        "localhost",
        "127.0.0.1",
        "gw.localhost",
        "console.gw.localhost",
        "x.console.gw.localhost",
    ] {
        let stolen = stolen_at(host);
        assert!(!stolen.contains("gw_session"), "{host}: {stolen}");
    }
    // Cookies have no port: only the name of the session keeps it.
    assert!(
        stolen_at(host).contains("gw_session="),
        "the browser has the session"
    );
    // The code in the address of the redirect was used.
    assert!(curl(&jar, &[address]).contains("<h1>Live tunnels"));

    // Under a shared name, the page names the other address.
    let shared = curl(&jar, &[&format!("{}/sign-in", scene.about.admin_url)]);
    assert!(
        shared.contains(&format!("<a href=\"{console}\">")),
        "{shared}"
    );
}
