//! The start and the end of processes of the product, without a scenario: two workers, an agent, a
//! backend and a caller.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests stop at the first surprise"
)]

use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gw_agent::support::simulation::{self as agent, RunningAgent};
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_data_plane::support::simulation::{RunningWorker, serve};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::net::{Listener, Socket, TlsStream};
use gw_shared::runtime;
use gw_simulated_kernel::{Ended as SimulationEnd, Host, simulate};
use gw_simulation::product::takeover::{self, LastStop};
use gw_simulation::product::{
    AgentPlan, Gateway, GatewayPlan, PlannedService, Region, ServicePlan, control,
};
use gw_telemetry::request_log::{Ended, RequestRecord};
use rustls::client::UnbufferedClientConnection;
use tokio::sync::watch;

/// Longest wait for anything.
const WITHIN: Duration = Duration::from_secs(60);
const GATEWAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 443);
const BACKEND: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)), 80);
const AGENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3));

/// A process of the gateway: its workers run as tasks.
struct Process {
    gateway: Gateway,
    hosts: Vec<Host>,
    workers: Vec<RunningWorker>,
    /// Workers that have stopped.
    stopped: Rc<Cell<usize>>,
}

impl Process {
    /// Starts two workers.
    fn start(region: &Rc<RefCell<Region>>, plan: GatewayPlan) -> Self {
        let (gateway, jobs) = Gateway::new(&region.borrow(), plan).unwrap();
        let publisher = gateway.publisher().clone();
        let control = Host::new("control", GATEWAY.ip());
        control.spawn(control::serve(Rc::clone(region), jobs, publisher));
        let stopped = Rc::new(Cell::new(0));
        let hosts = [(); 2].map(|()| Host::new("worker", GATEWAY.ip()));
        let workers = hosts.iter().enumerate().map(|(worker, host)| {
            let served = host.enter(|| {
                let listeners = vec![TcpListener::bind(GATEWAY).unwrap()];
                let (setup, inbox) = gateway.setup(&region.borrow(), worker, listeners);
                serve(setup, inbox, crossbeam_channel::bounded(1).0)
            });
            let (running, served) = served.unwrap();
            let stopped = Rc::clone(&stopped);
            host.spawn(async move {
                served.await;
                stopped.set(stopped.get() + 1);
            });
            running
        });
        let workers = workers.collect();
        Self {
            gateway,
            hosts: hosts.to_vec(),
            workers,
            stopped,
        }
    }

    /// Waits for the end of both workers. Nothing of them is left once the process has ended.
    async fn end(&self) {
        until("end of the process", async || self.stopped.get() == 2).await;
        self.hosts.iter().for_each(|host| host.kill());
        assert!(self.workers.iter().all(|worker| worker.probe().is_none()));
    }

    /// Waits until this number of tunnels is open.
    async fn has_tunnels(&self, tunnels: usize) {
        until("tunnels", async || {
            let reports = self.gateway.publisher().reports(false).await.unwrap();
            let open: usize = reports.iter().map(|report| report.tunnels.len()).sum();
            open == tunnels
        })
        .await;
    }

    /// Waits until nothing is held.
    async fn is_quiet(&self) {
        until("quiet", async || {
            self.workers.iter().all(|worker| {
                let probe = worker.probe().unwrap();
                let is_free = |tunnel: &gw_data_plane::support::simulation::TunnelProbe| {
                    let counts = [tunnel.open_streams, tunnel.report.in_flight, tunnel.unread];
                    counts == [0; 3] && tunnel.held == 0 && tunnel.committed == 0
                };
                let counts = [
                    probe.requests_in_flight,
                    probe.crossings_served,
                    probe.connections,
                    probe.handshakes,
                    probe.discards,
                    probe.openings,
                    probe.relay_bytes,
                ];
                counts == [0; 7] && probe.waiting.is_empty() && probe.tunnels.iter().all(is_free)
            })
        })
        .await;
    }
}

/// Waits for the records of `count` requests of the processes.
async fn ended(processes: &[&Process], count: usize) -> Vec<(Arc<str>, RequestRecord)> {
    let ended = RefCell::new(Vec::new());
    until("records", async || {
        for process in processes {
            ended.borrow_mut().extend(process.gateway.ended_requests());
        }
        ended.borrow().len() >= count
    })
    .await;
    ended.into_inner()
}

/// Waits until `holds`.
async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < WITHIN, "no {what}");
        runtime::sleep(Duration::from_millis(5)).await;
    }
}

/// Time between two reads of a slow backend, of 4 KiB each.
const SLOW: Duration = Duration::from_secs(3);

/// Answers each request with its target. A request with a body is answered before the body is read,
/// which takes long for `/slow` and does not happen for `/stalls`.
async fn backend() {
    let listener = Listener::new(TcpListener::bind(BACKEND).unwrap()).unwrap();
    loop {
        let (fd, _) = listener.accept().await.unwrap();
        runtime::spawn(async move {
            let socket = Socket::from_fd(fd).unwrap();
            let mut received = Vec::new();
            let mut buffer = [0; 4096];
            loop {
                let read = std::future::poll_fn(|cx| socket.poll_recv(cx, &mut buffer)).await;
                let Ok(1..) = read else {
                    return;
                };
                received.extend_from_slice(&buffer[..read.unwrap()]);
                let text = String::from_utf8(received.clone()).unwrap();
                if text.starts_with("PUT ") && text.contains("\r\n\r\n") {
                    return take_slowly(&socket, text.starts_with("PUT /stalls ")).await;
                }
                if !text.ends_with("\r\n\r\n") {
                    continue;
                }
                received.clear();
                let target = text.split(' ').nth(1).unwrap();
                let length = target.len();
                let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{target}");
                let mut pieces = [IoSlice::new(answer.as_bytes())];
                socket.send_all(&mut pieces).await.unwrap();
            }
        });
    }
}

/// Answers, and reads until the connection ends.
async fn take_slowly(socket: &Socket, stalls: bool) {
    let answer = b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\nok";
    socket.send_all(&mut [IoSlice::new(answer)]).await.unwrap();
    let mut buffer = [0; 4096];
    loop {
        runtime::sleep(SLOW).await;
        let read = std::future::poll_fn(|cx| socket.poll_recv(cx, &mut buffer));
        if !stalls && !matches!(read.await, Ok(1..)) {
            return;
        }
    }
}

/// A connection of a caller.
async fn connect(region: &Rc<RefCell<Region>>, service: &PlannedService) -> TlsStream {
    let config = region.borrow().certificates().caller(b"http/1.1").unwrap();
    let name = service.hostname.to_string().try_into().unwrap();
    let session = UnbufferedClientConnection::new(config, name).unwrap();
    let stream = TlsStream::new(Socket::connect(GATEWAY, None).await.unwrap(), session);
    stream.handshake().await.unwrap();
    stream
}

async fn send(stream: &TlsStream, bytes: &[u8]) {
    stream.write_all(&mut [IoSlice::new(bytes)]).await.unwrap();
    stream.flush().await.unwrap();
}

/// Sends a PUT, reads the response, sends the body as far as there is room for it within a second,
/// and leaves.
async fn put_and_leave(
    region: &Rc<RefCell<Region>>,
    service: &PlannedService,
    target: &str,
    length: usize,
) {
    let stream = connect(region, service).await;
    let head = format!(
        "PUT {target} HTTP/1.1\r\nhost: {}\r\nx-gw-service-key: {}\r\ncontent-length: {length}\r\n\
         \r\n",
        service.hostname, service.key
    );
    send(&stream, head.as_bytes()).await;
    let mut response = Vec::new();
    let mut buffer = [0; 4096];
    while !response.ends_with(b"ok") {
        let read = std::future::poll_fn(|cx| stream.poll_read(cx, &mut buffer)).await;
        response.extend_from_slice(&buffer[..read.unwrap()]);
    }
    let body = vec![b'.'; length];
    drop(runtime::timeout(Duration::from_secs(1), send(&stream, &body)).await);
}

/// Sends a GET on a new connection. Returns the response.
async fn get(region: &Rc<RefCell<Region>>, service: &PlannedService, target: &str) -> String {
    let stream = connect(region, service).await;
    let request = format!(
        "GET {target} HTTP/1.1\r\nhost: {}\r\nx-gw-service-key: {}\r\nconnection: close\r\n\r\n",
        service.hostname, service.key
    );
    send(&stream, request.as_bytes()).await;
    let mut response = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let read = std::future::poll_fn(|cx| stream.poll_read(cx, &mut buffer)).await;
        match read.unwrap() {
            0 => break,
            read => response.extend_from_slice(&buffer[..read]),
        }
    }
    // The gateway may be waiting for this end.
    drop(stream.close().await);
    String::from_utf8(response).unwrap()
}

/// A region with two services, and an agent of both whose state is below `folder`.
struct World {
    region: Rc<RefCell<Region>>,
    services: [PlannedService; 2],
    plan: AgentPlan,
    stop: watch::Sender<bool>,
    agent: RunningAgent,
}

impl World {
    fn start(folder: &Path) -> Self {
        let mut region = Region::new("sim", "example.com").unwrap();
        let services = ["api", "web"].map(|id| {
            region
                .add_service(&ServicePlan {
                    account: "acme".to_owned(),
                    id: id.to_owned(),
                    settings: ServiceSettings {
                        rate: Rate::new(1000, 1).unwrap(),
                        ..ServiceSettings::default()
                    },
                })
                .unwrap()
        });
        Host::new("backend", BACKEND.ip()).spawn(backend());
        let urls = vec![format!("http://{BACKEND}")];
        let plan = AgentPlan {
            number: 1,
            services: services
                .iter()
                .map(|service| (service.path.clone(), urls.clone()))
                .collect(),
            slots: 4,
            standby: false,
        };
        let config = plan.enroll(&mut region, GATEWAY, folder).unwrap();
        let (stop, stopped) = watch::channel(false);
        let host = Host::new("agent", AGENT);
        let (agent, running) = host.enter(|| agent::run(config, stopped));
        host.spawn(running);
        Self {
            region: Rc::new(RefCell::new(region)),
            services,
            plan,
            stop,
            agent,
        }
    }

    /// Requests of each service, some of which cross the workers.
    async fn relays(&self, requests: usize) {
        for service in &self.services {
            for number in 0..requests {
                let target = format!("/{}?{number}", service.label);
                let response = get(&self.region, service, &target).await;
                assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
                assert!(
                    response.ends_with(&format!("\r\n\r\n{target}")),
                    "{response}"
                );
            }
        }
    }
}

/// Runs `main` in a simulation, with a folder for files.
fn simulated<F: Future<Output = ()>>(main: impl FnOnce(PathBuf) -> F + Send + 'static) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let thread = std::thread::Builder::new().stack_size(8 << 20);
    let simulation = move || match simulate(1, false, async move || main(path).await) {
        SimulationEnd::Completed(()) => {}
        SimulationEnd::Panicked(message) => panic!("{message}"),
        SimulationEnd::Stuck | SimulationEnd::Endless => panic!("the simulation does not end"),
    };
    thread.spawn(simulation).unwrap().join().unwrap();
}

#[test]
fn requests_are_relayed_and_recorded_and_leave_nothing_behind() {
    simulated(async |folder: PathBuf| {
        let world = World::start(&folder);
        let region = &world.region;
        let plan = GatewayPlan::new(&region.borrow(), 2, &folder);
        let process = Process::start(region, plan);
        process.has_tunnels(2).await;
        world.relays(8).await;

        let ended = ended(&[&process], 16).await;
        assert_eq!(ended.len(), 16);
        for (label, record) in &ended {
            assert!(record.target.starts_with(&format!("/{label}?")));
            assert!(matches!(record.ended, Ended::Complete));
            assert_eq!(
                (record.status, record.agent.clone()),
                (Some(200), Some(world.plan.id().unwrap()))
            );
        }
        process.is_quiet().await;
        let services = world.agent.probe().unwrap();
        assert_eq!(services.len(), 2);
        for service in services.values() {
            assert_eq!((service.requests, service.is_up), (8, true));
            assert!(service.failures.is_empty());
            assert!(
                service
                    .tunnels
                    .iter()
                    .all(|tunnel| tunnel.slots_in_use == 0)
            );
            assert_eq!(service.backends.len(), 1);
            assert_eq!(service.backends[0].in_use, 0);
        }
    });
}

#[test]
fn a_backend_may_be_slow_but_not_stall_after_its_caller_has_left() {
    // More than the kernels of agent and backend hold, and than the backend reads in 30 seconds
    // behind them. So little that the gateway's kernel gets the end of the caller behind the body.
    const BODY: usize = 768 * 1024;
    simulated(async |folder: PathBuf| {
        let world = World::start(&folder);
        let region = &world.region;
        let plan = GatewayPlan::new(&region.borrow(), 2, &folder);
        let process = Process::start(region, plan);
        process.has_tunnels(2).await;
        for service in &world.services {
            let began = Instant::now();
            put_and_leave(region, service, "/stalls", BODY).await;
            runtime::sleep(gw_data_plane::limits::LAST_BYTES).await;
            let (_, record) = ended(&[&process], 1).await.remove(0);
            assert!(matches!(record.ended, Ended::CallerGone));
            let took = began.elapsed().as_secs();
            assert!((30..40).contains(&took), "{took} s");
            process.is_quiet().await;

            put_and_leave(region, service, "/slow", BODY).await;
            // The last bytes are in the kernels then.
            runtime::sleep(SLOW * (BODY / 4096) as u32).await;
            let (_, record) = ended(&[&process], 1).await.remove(0);
            assert!(matches!(record.ended, Ended::Complete));
            assert_eq!(record.bytes_taken, Some(BODY as u64));
            process.is_quiet().await;
        }
    });
}

#[test]
fn a_disabled_key_and_a_revoked_agent_are_refused_within_a_second() {
    simulated(async |folder: PathBuf| {
        let world = World::start(&folder);
        let region = &world.region;
        let plan = GatewayPlan::new(&region.borrow(), 2, &folder);
        let process = Process::start(region, plan);
        process.has_tunnels(2).await;
        let [api, web] = &world.services;
        world.relays(1).await;

        region.borrow_mut().enable_key(&web.key_id, false).unwrap();
        let publisher = process.gateway.publisher();
        publisher.publish(&region.borrow());
        runtime::sleep(Duration::from_secs(1)).await;
        let response = get(region, web, "/").await;
        assert!(response.contains("GW_SERVICE_KEY"), "{response}");

        let agent = world.plan.id().unwrap();
        let revoke = |record: &mut gw_store::AgentRecord| record.status = EnrollmentStatus::Revoked;
        region.borrow_mut().change_agent(&agent, revoke).unwrap();
        publisher.publish(&region.borrow());
        runtime::sleep(Duration::from_secs(1)).await;
        process.has_tunnels(0).await;
        let response = get(region, api, "/").await;
        assert!(response.contains("AGENT_UNAVAILABLE"), "{response}");
    });
}

#[test]
fn another_process_takes_over_and_a_later_one_starts_again() {
    simulated(async |folder: PathBuf| {
        let world = World::start(&folder);
        let region = &world.region;
        let plan = || GatewayPlan::new(&region.borrow(), 2, &folder);
        let first = Process::start(region, plan());
        first.has_tunnels(2).await;
        world.relays(2).await;

        let old = first.gateway.publisher();
        let tunnels_before = takeover::live_tunnels(old).await.unwrap();
        assert_eq!(tunnels_before.values().sum::<usize>(), 2);
        let plan_of_second = GatewayPlan {
            levels: None,
            tunnels_before,
            ..plan()
        };
        let second = Process::start(region, plan_of_second);
        let new = second.gateway.publisher();
        let charges = takeover::take_over((old, &first.hosts), (new, &second.hosts))
            .await
            .unwrap();
        runtime::spawn(async move { charges.await.unwrap() });
        let drained = takeover::drain(old, true, WITHIN);
        let (drained, ()) = join(drained, world.relays(4)).await;
        assert!(drained.unwrap().levels.is_empty());
        second.has_tunnels(2).await;
        first.end().await;
        // The first one may still accept a connection while it begins to drain.
        assert_eq!(ended(&[&first, &second], 12).await.len(), 12);

        // Both processes have charged one bucket, which gets one request back per minute.
        let LastStop { levels, tunnels } = takeover::drain(new, false, WITHIN).await.unwrap();
        second.end().await;
        assert_eq!((levels.len(), tunnels.len()), (2, 2));
        for level in &levels {
            assert_eq!(level.until_full_ms.div_ceil(60_000), 6, "{level:?}");
        }
        let plan_of_third = GatewayPlan {
            levels: Some(levels),
            tunnels_before: tunnels,
            ..plan()
        };
        let third = Process::start(region, plan_of_third);
        world.relays(1).await;
        third.has_tunnels(2).await;
        world.stop.send_replace(true);
        third.has_tunnels(0).await;
    });
}

/// Runs two futures at once.
async fn join<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (std::pin::pin!(a), std::pin::pin!(b));
    let (mut first, mut second) = (None, None);
    std::future::poll_fn(|cx| {
        use std::task::Poll;
        if first.is_none()
            && let Poll::Ready(done) = a.as_mut().poll(cx)
        {
            first = Some(done);
        }
        if second.is_none()
            && let Poll::Ready(done) = b.as_mut().poll(cx)
        {
            second = Some(done);
        }
        match (first.take(), second.take()) {
            (Some(one), Some(two)) => Poll::Ready((one, two)),
            (one, two) => {
                (first, second) = (one, two);
                Poll::Pending
            }
        }
    })
    .await
}
