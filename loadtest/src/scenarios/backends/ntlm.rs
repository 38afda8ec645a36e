//! Express with NTLM, which authenticates connections, at two servers behind two agents.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Bench, Figures, Missed, find, need, start_with_url};
use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::machine::process;
use crate::scenarios::agents::site::Plan;

/// The server of the interoperability tests. It answers with method and user.
const SERVER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../gateway/tests/interop/ntlm_server.cjs"
);
const USERS: usize = 8;
const HANDSHAKES_EACH: usize = 25;

pub(super) fn run(bench: &Bench) -> Figures {
    let node = find("node", "nodejs")?;
    let curl = find("curl", "curl")?;
    let modules = bench.programs.join("node_modules");
    let mut trial = Command::new(&node);
    trial.args(["-e", "require('express-ntlm'); require('express')"]);
    need(
        trial.env("NODE_PATH", &modules),
        "express-ntlm of npm is not installed",
    )?;
    let server = || -> Result<_, Missed> {
        let mut command = process::command(&node, &[])?;
        command.arg(SERVER).env("NODE_PATH", &modules);
        Ok(start_with_url("ntlm_server.cjs", &mut command)?)
    };
    let servers = [server()?, server()?];
    let plans = servers.iter().map(|(_, url)| Plan::new(url)).collect();
    let pool = bench.site.pool(plans)?;
    let target = &pool.targets()?[0];
    let calls = &Calls {
        curl,
        target,
        ca_file: bench.site.ca_file(),
    };
    let mut wrong = Vec::new();
    std::thread::scope(|scope| {
        let of_user = |user| scope.spawn(move || calls.of_user(user));
        let users: Vec<_> = (0..USERS).map(of_user).collect();
        for user in users {
            let answers = user.join().unwrap_or_else(|_| Err(Failure::new("a panic")));
            wrong.extend(answers?);
        }
        Ok::<(), Failure>(())
    })?;
    let handshakes = USERS * HANDSHAKES_EACH;
    ensure(wrong.is_empty(), || {
        format!("{} wrong answers, the first: {}", wrong.len(), wrong[0])
    })?;
    Ok(format!(
        "express-ntlm and curl --ntlm, two agents: {handshakes} handshakes of {USERS} users, two \
         requests each, and as many callers without credentials: each response names its user, or \
         is 401"
    ))
}

struct Calls<'a> {
    curl: PathBuf,
    target: &'a Target,
    ca_file: &'a Path,
}

impl Calls<'_> {
    /// Handshakes of a user, each followed by a caller without credentials. Returns the wrong
    /// answers.
    fn of_user(&self, user: usize) -> Result<Vec<String>, Failure> {
        let mut wrong = Vec::new();
        for number in 0..HANDSHAKES_EACH {
            let method = if number % 2 == 0 { "GET" } else { "POST" };
            let content: &[&str] = if number % 2 == 0 {
                &[]
            } else {
                &["--data", "content"]
            };
            let password = format!("user{user}:secret");
            let with_ntlm = [&["--ntlm", "--user", &password], content].concat();
            let answer = format!("{method} user{user}\n");
            // Two requests on one connection.
            let expected = format!("{answer}200 1\n{answer}200 0\n");
            for (arguments, expected) in
                [(&with_ntlm[..], expected.as_str()), (&[], "401 1\n401 0\n")]
            {
                let answer = self.twice(arguments)?;
                if answer != expected {
                    wrong.push(format!("{answer:?} in place of {expected:?}"));
                }
            }
        }
        Ok(wrong)
    }

    /// Output of curl for two requests on a connection.
    fn twice(&self, arguments: &[&str]) -> Result<String, Failure> {
        let Target {
            port,
            host,
            service_key,
            ..
        } = self.target;
        let url = format!("https://{host}:{port}/");
        let mut command = Command::new(&self.curl);
        command
            .args(["--silent", "--show-error", "--http1.1", "--cacert"])
            .arg(self.ca_file)
            .args(["--resolve", &format!("{host}:{port}:127.0.0.1"), "--header"])
            .arg(format!("X-Gw-Service-Key: {service_key}"))
            .args(["--write-out", "%{http_code} %{num_connects}\n"])
            .args(arguments)
            .args([&url, &url]);
        let output = command.output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
