//! gunicorn, which closes connections that are idle for its keep-alive of two seconds.

use std::process::Stdio;
use std::time::Duration;

use super::{Bench, Figures, posts, program, wait_for_port};
use crate::failure::ensure;
use crate::machine::process::{self, Process};

const CALLERS: usize = 50;
const EACH: usize = 20;

pub(super) fn run(bench: &Bench) -> Figures {
    let python = bench.python("gunicorn")?;
    let [port] = process::free_ports()?;
    let mut command = process::command(&python, &[])?;
    command
        .args([
            "-m",
            "gunicorn",
            "--worker-class",
            "gthread",
            "--threads",
            "8",
        ])
        .args(["--bind", &format!("127.0.0.1:{port}"), "--chdir"])
        .arg(program(""))
        .arg("posts:application");
    command.stdin(Stdio::null()).stderr(Stdio::null());
    let _gunicorn = Process::spawn("gunicorn", &mut command)?;
    wait_for_port(port)?;
    let pool = bench.pool(&format!("http://127.0.0.1:{port}"))?;
    let target = &pool.targets()?[0];
    // From 1.9 s to 2.1 s, and every fifth one second less: a connection that the agent still uses.
    let pause = |number: usize| {
        let near = 1900 + number as u64 * 7 % 200;
        Duration::from_millis(if number.is_multiple_of(5) {
            near - 1000
        } else {
            near
        })
    };
    let failures = posts::send(target, CALLERS, EACH, pause)?;
    let counted = target.connect()?.ask("/")?.body;
    let counted = String::from_utf8_lossy(&counted);
    let requests = CALLERS * EACH;
    let figures = format!(
        "gthread, keep-alive 2 s: {requests} POSTs with pauses of 0.9 to 2.1 s: failures \
         {failures:?}; requests and repeated ones at gunicorn: {counted}"
    );
    ensure(
        failures.is_empty() && counted == format!("{requests} 0"),
        || figures.clone(),
    )?;
    Ok(figures)
}
