//! Requests once all faults are over: each service answers again.

use std::rc::Rc;
use std::time::Duration;

use gw_shared::runtime;
use gw_simulated_kernel::{Host, clock};

use super::{Violation, World, caller, machine};
use crate::product::SetupError;
use crate::scenario::{Caller, Conduct, Framing, Method, Request, Response, ResponseFault};

/// Longest time that a service may need: an agent waits for up to 120 seconds before it connects
/// again (docs/agent.md), and a breaker that has opened often stays open for up to 90 seconds
/// (docs/redundancy.md).
const WITHIN: Duration = Duration::from_secs(240);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_secs(1);
/// First id of these requests.
const IDS: u32 = 1_000_000;

/// Sends a request to each service until it is answered.
pub(super) async fn services_recover(world: &Rc<World>) -> Result<(), SetupError> {
    let mut ids = IDS..;
    let began = clock::now().unwrap_or(0);
    let scenario = &world.scenario;
    let has_agent = |service: &usize| {
        let mut agents = 0..scenario.agents.len();
        agents.any(|agent| scenario.serves(agent, *service))
    };
    for service in (0..world.services.len()).filter(has_agent) {
        // Either protocol in half of the seeds.
        let is_http2 = (world.scenario.seed + service as u64).is_multiple_of(2);
        loop {
            let id = ids.next().unwrap_or(IDS);
            try_once(world, request(service, is_http2, id)).await?;
            let answer = world
                .ledger
                .seen(id, |seen| (seen.answer_to, seen.code.clone()));
            if answer.0.is_some() {
                break;
            }
            if Duration::from_nanos(clock::now().unwrap_or(0) - began) > WITHIN {
                world.check(Err(Violation {
                    invariant: "services recover once faults are over",
                    found: format!("service {service} answers {:?}", answer.1),
                }));
                return Ok(());
            }
            runtime::sleep(PAUSE).await;
        }
    }
    Ok(())
}

async fn try_once(world: &Rc<World>, plan: Caller) -> Result<(), SetupError> {
    world.ledger.add(plan.requests[0].clone());
    let number = world.scenario.callers.len();
    let host = Host::new("probe", machine(1, number));
    let (ended, end) = tokio::sync::oneshot::channel();
    let caller = world.caller(number, plan)?;
    host.spawn(async move {
        caller::run(caller).await;
        // The world waits.
        let _ = ended.send(());
    });
    // Fails if the caller does not end.
    let _ = end.await;
    host.kill();
    Ok(())
}

fn request(service: usize, is_http2: bool, id: u32) -> Caller {
    Caller {
        service,
        is_http2,
        begins: Duration::ZERO,
        at_once: 1,
        pipelined: 1,
        pause: Duration::ZERO,
        requests: vec![Request {
            id,
            method: Method::Get,
            upload: None,
            response: Response {
                status: 200,
                length: 10,
                framing: Framing::Length,
                interim: 0,
                has_trailers: false,
                delay: Duration::ZERO,
                is_early: false,
                fault: ResponseFault::None,
            },
            conduct: Conduct::Patient,
        }],
    }
}
