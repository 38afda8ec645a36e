//! One of four agents is lost, and sessions have a cookie.

use std::time::Duration;

use serde_json::json;

use super::site::{Plan, Pool, Site};
use super::table::Row;
use crate::backend::{Backend, Received};
use crate::callers::Outcome;
use crate::client::Connection;
use crate::failure::{Failure, ensure};

const AGENTS: usize = 4;
const SESSIONS: usize = 1000;

/// Cookie of a session, and the agent that answered its last request.
struct Session {
    cookie: String,
    agent: String,
}

pub(super) fn run(site: &Site) -> Result<Vec<Row>, Failure> {
    let received = Received::default();
    let backends: Vec<Backend> = (0..AGENTS)
        .map(|number| received.backend(Duration::ZERO, &number.to_string()))
        .collect::<std::io::Result<_>>()?;
    let mut pool = site.pool(
        backends
            .iter()
            .map(|backend| Plan::new(&backend.url))
            .collect(),
    )?;
    let with_affinity = pool.set(&json!({ "affinity": "cookie" }));
    with_affinity
        .map_err(|error| Failure::during("this gateway has no affinity by cookie", error))?;
    let mut connections = pool
        .targets()?
        .iter()
        .map(|target| target.connect())
        .collect::<Result<Vec<_>, _>>()?;
    let mut sessions = (0..SESSIONS)
        .map(|number| begin(&mut connections, number))
        .collect::<Result<Vec<_>, _>>()?;
    let of_agent = |sessions: &[Session], agent: &str| {
        sessions
            .iter()
            .filter(|session| session.agent == agent)
            .count()
    };
    let fewest = (0..AGENTS)
        .map(|agent| of_agent(&sessions, &agent.to_string()))
        .min()
        .unwrap_or_default();
    let moved_before = go_on(&mut connections, &mut sessions)?.0;
    let lost = of_agent(&sessions, "0");
    lose(&mut pool)?;
    let (moved, of_others) = go_on(&mut connections, &mut sessions)?;
    let (moved_after, _) = go_on(&mut connections, &mut sessions)?;
    Ok(vec![
        Row::new(
            format!("sticky, {SESSIONS} sessions, {AGENTS} agents"),
            &Outcome::default(),
        )
        .check(
            moved_before == 0,
            format!("{moved_before} moved while nothing was lost"),
        )
        .check(of_others == 0, format!("{of_others} of other agents moved"))
        .check(
            moved == lost,
            format!("{moved} of {lost} sessions of the lost agent moved"),
        )
        .check(moved_after == 0, format!("{moved_after} moved again"))
        .check(
            fewest > SESSIONS / AGENTS / 2,
            format!("at least {fewest} sessions of each agent"),
        ),
    ])
}

/// Begins a session with a request that has no cookie.
fn begin(connections: &mut [Connection], number: usize) -> Result<Session, Failure> {
    let answer = connections[number % connections.len()].ask("/hello")?;
    ensure(answer.head.status == 200, || {
        format!("a first request got {}", answer.head.status)
    })?;
    let cookie = answer
        .head
        .field("set-cookie")
        .and_then(|cookie| cookie.split(';').next());
    let cookie = cookie
        .ok_or_else(|| Failure::new("a response without Set-Cookie"))?
        .to_owned();
    Ok(Session {
        cookie,
        agent: String::from_utf8_lossy(&answer.body).into_owned(),
    })
}

/// Sends a request of each session. Returns how many moved to another agent, and how many of them
/// were not of agent 0.
fn go_on(
    connections: &mut [Connection],
    sessions: &mut [Session],
) -> Result<(usize, usize), Failure> {
    let mut moved = 0;
    let mut of_others = 0;
    for (number, session) in sessions.iter_mut().enumerate() {
        let connection = &mut connections[(number + 1) % connections.len()];
        let answer = connection.ask_with("/hello", &format!("Cookie: {}\r\n", session.cookie))?;
        ensure(answer.head.status == 200, || {
            format!("a request of a session got {}", answer.head.status)
        })?;
        if let Some(cookie) = answer
            .head
            .field("set-cookie")
            .and_then(|cookie| cookie.split(';').next())
        {
            cookie.clone_into(&mut session.cookie);
        }
        let agent = String::from_utf8_lossy(&answer.body).into_owned();
        if agent != session.agent {
            moved += 1;
            of_others += usize::from(session.agent != "0");
        }
        session.agent = agent;
    }
    Ok((moved, of_others))
}

fn lose(pool: &mut Pool<'_>) -> Result<(), Failure> {
    pool.agents[0].kill()?;
    pool.wait_for_tunnels(AGENTS - 1)
}
