//! What takes place in a simulation: a list of plans, made from a seed and shortened without it.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use serde::{Deserialize, Serialize};

mod faults;

use self::faults::{fault, fault_of_nodes, replacement};

/// All that takes place. The seed of the kernel decides the rest: order, delays and sizes of
/// segments.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scenario {
    /// Seed of the kernel.
    pub seed: u64,
    /// Workers of the gateway.
    pub workers: usize,
    pub services: Vec<Service>,
    pub agents: Vec<Agent>,
    pub callers: Vec<Caller>,
    pub faults: Vec<Fault>,
    /// Delay between machines.
    pub delay: Duration,
    /// Largest segment of the network, in bytes.
    pub segment: usize,
    /// Connections of callers stay with the worker that accepts them, and their requests cross to
    /// that of the tunnel.
    #[serde(default)]
    pub crosses_workers: bool,
    /// Nodes of the region. Callers and agents reach any of them.
    #[serde(default = "one_node")]
    pub nodes: usize,
}

fn one_node() -> usize {
    1
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// Requests that its bucket admits at once, and per minute.
    pub burst: u32,
    pub per_minute: u32,
    pub retries: bool,
    #[serde(default)]
    pub affinity: Affinity,
    /// Number of its account.
    #[serde(default)]
    pub account: usize,
}

/// What a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Affinity {
    #[default]
    None,
    /// The callers with a cookie of the gateway.
    Cookie,
    /// The callers with a value of a field.
    Header,
    /// The callers of an address.
    Client,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Agent {
    /// Requests at once.
    pub slots: u32,
    pub is_standby: bool,
    /// Its backends speak HTTP/2 without TLS.
    #[serde(default)]
    pub has_http2_backends: bool,
    /// Number of its account. It serves the services of this account.
    #[serde(default)]
    pub account: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Caller {
    pub service: usize,
    pub is_http2: bool,
    /// When it begins.
    pub begins: Duration,
    /// Requests at once; more than one with HTTP/2 only.
    pub at_once: usize,
    /// Safe requests that are sent before the response to the first of them has arrived; over
    /// HTTP/1.1 only.
    #[serde(default)]
    pub pipelined: usize,
    /// Pause between two requests.
    pub pause: Duration,
    pub requests: Vec<Request>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Unique in the scenario: it names the request in its path.
    pub id: u32,
    pub method: Method,
    pub upload: Option<Upload>,
    pub response: Response,
    pub conduct: Conduct,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    /// A switch of protocols, after which both sides send.
    Upgrade,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Upload {
    pub length: usize,
    pub is_chunked: bool,
    /// Waits for 100 (Continue); over HTTP/1.1 only.
    #[serde(default)]
    pub expects_continue: bool,
    /// Trailers follow a chunked upload.
    #[serde(default)]
    pub has_trailers: bool,
    /// Pause after every 16 KiB.
    pub pause: Duration,
    /// Pause of the upload after its first half.
    #[serde(default)]
    pub stall: Duration,
    /// After a switch of protocols, each side sends all that it has and ends its direction.
    /// Otherwise, it is an echo.
    #[serde(default)]
    pub in_halves: bool,
}

/// How the caller behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Conduct {
    Patient,
    /// Waits before each read of 1 KiB.
    SlowReader(Duration),
    /// Closes its connection, or resets its stream, once it has sent the head and half of the body.
    LeavesEarly,
    /// As above, once half of the response has arrived.
    LeavesInResponse,
    /// Sends half of the head, and closes its connection after a second.
    HalfHead,
}

/// What the backend answers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Response {
    pub status: u16,
    pub length: usize,
    pub framing: Framing,
    /// Interim responses (103) before the final one.
    pub interim: u8,
    pub has_trailers: bool,
    /// Pause before the response.
    pub delay: Duration,
    /// Answers before it has read the request body. After a switch of protocols: ends its direction
    /// before it reads.
    pub is_early: bool,
    pub fault: ResponseFault,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Framing {
    Length,
    Chunked,
    Close,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResponseFault {
    None,
    /// Closes the connection before the response.
    Closes,
    /// Resets the connection before the response.
    Resets,
    /// The head is not HTTP.
    Garbage,
    /// Closes the connection in the middle of the body.
    ClosesInBody,
    /// Resets the connection in the middle of the body.
    ResetsInBody,
    /// Sends more than the announced length.
    TooLong,
    /// Waits for this time in the middle of the body.
    Stalls(Duration),
}

/// A fault of the world or an act of an administrator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    pub at: Duration,
    pub kind: FaultKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// The agent's process is killed, and started again after a time.
    KillAgent { agent: usize, back_after: Duration },
    /// The agent's process stands still for a time.
    FreezeAgent { agent: usize, lasts: Duration },
    /// A copy of the agent's state folder is started on another machine for a time.
    CopyAgent { agent: usize, lasts: Duration },
    /// The agent ends as after SIGTERM, and starts again after a time.
    DrainAgent { agent: usize, back_after: Duration },
    /// The path between agent and gateway is cut for a time.
    CutAgent { agent: usize, lasts: Duration },
    /// The path between agent and backend is cut for a time.
    CutBackend { agent: usize, lasts: Duration },
    /// The backend's process is killed, and started again after a time.
    KillBackend { agent: usize, back_after: Duration },
    /// The path between a caller and the gateway is cut for a time.
    CutCaller { caller: usize, lasts: Duration },
    /// A worker of the gateway does not run for a time.
    FreezeWorker { worker: usize, lasts: Duration },
    /// The service key of the service is disabled for a time.
    DisableKey { service: usize, lasts: Duration },
    /// The agent is revoked for a time.
    RevokeAgent { agent: usize, lasts: Duration },
    /// The service gets a bucket of this size.
    ChangeRate { service: usize, burst: u32 },
    /// Another process takes over the gateway's, which drains.
    TakeOver,
    /// A worker of the gateway panics, and starts again.
    PanicWorker { worker: usize },
    /// The gateway's process is killed, and started again after a time.
    KillGateway { back_after: Duration },
    /// The path between two nodes is cut for a time.
    CutNodes {
        one: usize,
        other: usize,
        lasts: Duration,
    },
    /// A node owns no services for a time: they move to others, and back.
    LeaveNode { node: usize, back_after: Duration },
    /// The wall clock of all machines is set forward or back.
    JumpClock { by: Duration, forward: bool },
}

impl Scenario {
    /// The scenario of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let rng = &mut rng;
        let accounts = if rng.u8(..4) == 0 { 2 } else { 1 };
        let services = (0..rng.usize(1..=2)).map(|_| service(rng, accounts));
        let services: Vec<Service> = services.collect();
        let agents = rng.usize(1..=3).max(services.len());
        let agents: Vec<Agent> = (0..agents)
            .map(|number| {
                // Each service has an agent.
                let service = services.get(number).unwrap_or(&services[0]);
                agent(rng, service.account)
            })
            .collect();
        let is_benign = rng.u8(..4) == 0;
        let mut ids = 0..;
        let callers: Vec<Caller> = (0..rng.usize(1..=8))
            .map(|_| caller(rng, services.len(), is_benign, &mut ids))
            .collect();
        let workers = rng.usize(1..=4);
        let faults = match is_benign {
            true => 0,
            false => rng.usize(0..=4),
        };
        let mut faults: Vec<Fault> = (0..faults)
            .map(|_| Fault {
                at: Duration::from_millis(rng.u64(0..4000)),
                kind: fault(rng, workers, &services, &agents, callers.len()),
            })
            .collect();
        if !is_benign && rng.u8(..4) == 0 {
            faults.extend(replacement(rng, workers, &services, &agents));
        }
        let crosses_workers = rng.u8(..4) == 0;
        let nodes = if rng.u8(..4) == 0 { 3 } else { 1 };
        if !is_benign && nodes > 1 {
            if rng.bool() {
                faults.clear();
            }
            for _ in 0..rng.usize(1..=2) {
                faults.extend(fault_of_nodes(rng, nodes, &agents));
            }
        }
        faults.sort_by_key(|fault| fault.at);
        Self {
            seed,
            workers,
            services,
            agents,
            callers,
            faults,
            delay: Duration::from_micros([20, 500, 20_000][rng.usize(..3)]),
            segment: [64 * 1024, 1460, 64 * 1024, 300][rng.usize(..4)],
            crosses_workers,
            nodes,
        }
    }

    /// The node whose processes and workers have faults.
    pub fn faulty_node(&self) -> usize {
        usize::try_from(self.seed % self.nodes as u64).unwrap_or(0)
    }

    /// Whether an agent serves a service.
    pub fn serves(&self, agent: usize, service: usize) -> bool {
        self.agents[agent].account == self.services[service].account
    }

    /// Requests to a service.
    pub fn requests_to(&self, service: usize) -> impl Iterator<Item = &Request> {
        let callers = self.callers.iter();
        callers
            .filter(move |caller| caller.service == service)
            .flat_map(|caller| &caller.requests)
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.callers
            .iter()
            .map(|caller| caller.requests.len())
            .sum()
    }
}

fn service(rng: &mut Rng, accounts: usize) -> Service {
    Service {
        burst: [1000, 1000, 10][rng.usize(..3)],
        per_minute: 600,
        retries: rng.u8(..4) != 0,
        affinity: match rng.u8(..8) {
            0 => Affinity::Cookie,
            1 => Affinity::Header,
            2 => Affinity::Client,
            _ => Affinity::None,
        },
        account: rng.usize(..accounts),
    }
}

fn agent(rng: &mut Rng, account: usize) -> Agent {
    Agent {
        slots: [128, 128, 2, 1][rng.usize(..4)],
        is_standby: rng.u8(..8) == 0,
        has_http2_backends: rng.u8(..4) == 0,
        account,
    }
}

fn caller(
    rng: &mut Rng,
    services: usize,
    is_benign: bool,
    ids: &mut impl Iterator<Item = u32>,
) -> Caller {
    let is_http2 = rng.bool();
    let count = rng.usize(1..=60);
    let mut request = || {
        let id = ids.next().unwrap_or(0);
        request(rng, id, is_http2, is_benign)
    };
    let requests = (0..count).map(|_| request()).collect();
    Caller {
        service: rng.usize(..services),
        is_http2,
        begins: Duration::from_millis(rng.u64(0..3000)),
        at_once: match is_http2 {
            true if rng.u8(..8) == 0 => 40,
            true => rng.usize(1..=8),
            false => 1,
        },
        pipelined: if !is_http2 && rng.u8(..4) == 0 { 4 } else { 1 },
        pause: Duration::from_millis([0, 0, 5, 200][rng.usize(..4)]),
        requests,
    }
}

fn request(rng: &mut Rng, id: u32, is_http2: bool, is_benign: bool) -> Request {
    let method = match rng.u8(..16) {
        0..8 => Method::Get,
        8 => Method::Head,
        9..13 => Method::Post,
        13 if !is_http2 => Method::Upgrade,
        _ => Method::Put,
    };
    let has_upload = matches!(method, Method::Post | Method::Put | Method::Upgrade);
    let is_chunked = rng.bool();
    let upload = has_upload.then(|| Upload {
        length: size(rng),
        is_chunked,
        expects_continue: !is_http2 && method != Method::Upgrade && rng.u8(..8) == 0,
        has_trailers: is_chunked && rng.bool(),
        pause: Duration::from_millis([0, 0, 0, 20][rng.usize(..4)]),
        stall: Duration::from_millis(if rng.u8(..8) == 0 {
            rng.u64(1..8000)
        } else {
            0
        }),
        in_halves: method == Method::Upgrade && rng.bool(),
    });
    let conduct = match rng.u8(..if is_benign { 1 } else { 48 }) {
        0..42 => Conduct::Patient,
        42..44 => Conduct::SlowReader(Duration::from_millis(rng.u64(1..50))),
        44 => Conduct::LeavesEarly,
        45..47 => Conduct::LeavesInResponse,
        _ => Conduct::HalfHead,
    };
    Request {
        id,
        method,
        upload,
        response: response(rng, is_benign, upload.as_ref()),
        conduct,
    }
}

fn response(rng: &mut Rng, is_benign: bool, upload: Option<&Upload>) -> Response {
    let fault = match rng.u8(..if is_benign { 1 } else { 48 }) {
        0..41 => ResponseFault::None,
        41 => ResponseFault::Closes,
        42 => ResponseFault::Resets,
        43 => ResponseFault::Garbage,
        44 => ResponseFault::ClosesInBody,
        45 => ResponseFault::ResetsInBody,
        46 => ResponseFault::TooLong,
        _ => ResponseFault::Stalls(Duration::from_millis(rng.u64(1..3000))),
    };
    let framing = match rng.u8(..8) {
        0..4 => Framing::Length,
        4..7 => Framing::Chunked,
        _ => Framing::Close,
    };
    let is_early = match upload {
        Some(upload) if upload.in_halves => rng.bool(),
        Some(_) => !is_benign && rng.u8(..12) == 0,
        None => false,
    };
    Response {
        status: [200, 200, 200, 404, 500, 204][rng.usize(..6)],
        length: size(rng),
        framing,
        interim: if rng.u8(..8) == 0 { rng.u8(1..3) } else { 0 },
        has_trailers: framing == Framing::Chunked && rng.bool(),
        delay: Duration::from_millis([0, 0, 0, 1, 30, 500][rng.usize(..6)]),
        is_early,
        fault,
    }
}

/// Sizes of bodies around the limits of buffers and windows.
fn size(rng: &mut Rng) -> usize {
    match rng.u8(..128) {
        0..16 => 0,
        16..96 => rng.usize(1..2000),
        96..124 => rng.usize(2000..20_000),
        124..127 => rng.usize(20_000..200_000),
        _ => rng.usize(200_000..1_000_000),
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}: {} nodes, {} workers, delay {:?}, segments of {} bytes{}",
            self.seed,
            self.nodes,
            self.workers,
            self.delay,
            self.segment,
            if self.crosses_workers {
                ", requests cross workers"
            } else {
                ""
            }
        )?;
        for (number, service) in self.services.iter().enumerate() {
            writeln!(f, "service {number}: {service:?}")?;
        }
        for (number, agent) in self.agents.iter().enumerate() {
            writeln!(f, "agent {number}: {agent:?}")?;
        }
        for (number, caller) in self.callers.iter().enumerate() {
            let Caller {
                service,
                is_http2,
                begins,
                at_once,
                pipelined,
                pause,
                requests,
            } = caller;
            let protocol = if *is_http2 { "HTTP/2" } else { "HTTP/1.1" };
            writeln!(
                f,
                "caller {number}: {protocol} to service {service} from {begins:?}, {at_once} at \
                 once, {pipelined} pipelined, pause {pause:?}"
            )?;
            for request in requests {
                writeln!(f, "  {request:?}")?;
            }
        }
        for Fault { at, kind } in &self.faults {
            writeln!(f, "fault at {at:?}: {kind:?}")?;
        }
        Ok(())
    }
}
