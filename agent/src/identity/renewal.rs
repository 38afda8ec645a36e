//! Renews the agent's certificate through its tunnels, long before it expires. Tunnels that are up stay as they are;
//! the next one uses the new certificate.

use std::time::{Duration, SystemTime};

use gw_shared::identity::enrollment::CertificateReply;
use gw_shared::runtime;
use gw_shared::tunnel::text::error_line;
use rcgen::KeyPair;

use crate::identity::key_pair::{self, UnfitIdentity, Validity};
use crate::identity::state::StateError;
use crate::supervisor::{Agent, random};
use crate::tunnel::reconnect::Backoff;

/// How long the gateway has for an answer, from when the request was left for a tunnel.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Longest sleep before the clock is looked at again: it may have been set, or the machine suspended.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
enum RenewalError {
    #[error("no tunnel brought an answer within {ANSWER_WITHIN:?}")]
    NoAnswer,
    #[error("the gateway refused: {}", error_line(.0))]
    Refused(String),
    #[error("the new certificate cannot be used: {0}")]
    Unfit(#[from] UnfitIdentity),
    #[error(transparent)]
    State(#[from] StateError),
}

/// Keeps the certificate fresh for as long as it is polled.
pub(crate) async fn keep_fresh(agent: &Agent) {
    // Both drawn once per certificate: chances taken again at every look would add up, and an answer that comes late
    // is still for the key that the next request is for.
    let (mut luck, mut key) = (random(), None);
    let mut backoff = Backoff::new();
    loop {
        match renew_if_due(agent, luck, &mut key).await {
            Ok(Outcome::NotDue(wait)) => runtime::sleep(wait.min(LOOK_AGAIN)).await,
            Ok(Outcome::Renewed(reply)) => {
                tracing::info!(not_after = reply.not_after, "certificate renewed");
                agent.observed.renewals.set(agent.observed.renewals.get() + 1);
                agent.desk.services_are(reply.services);
                (luck, key) = (random(), None);
                backoff.reset();
            }
            Err(error) => {
                let delay = backoff.next_delay(random());
                tracing::warn!(%error, retry_in = ?delay, "certificate not renewed");
                agent.observed.failed_renewals.set(agent.observed.failed_renewals.get() + 1);
                runtime::sleep(delay).await;
            }
        }
    }
}

enum Outcome {
    NotDue(Duration),
    Renewed(CertificateReply),
}

async fn renew_if_due(agent: &Agent, luck: f64, key: &mut Option<KeyPair>) -> Result<Outcome, RenewalError> {
    let state = &agent.config.state;
    // Read anew each time: recovery may have replaced it.
    let validity = state.identity()?.validity()?;
    agent.observed.certificate_expiry.set(Some(validity.not_after));
    // By the gateway's clock; and not one after the other, should that be wrong, too.
    let wait = due(validity, luck).duration_since(agent.clock.now()).unwrap_or_default().max(agent.issuance.wait());
    if !wait.is_zero() {
        return Ok(Outcome::NotDue(wait));
    }
    let key = match key {
        Some(key) => key,
        None => key.insert(KeyPair::generate().map_err(UnfitIdentity::Key)?),
    };
    let answer = agent.desk.ask(key_pair::certificate_request(key).map_err(UnfitIdentity::Key)?);
    let reply = match runtime::timeout(ANSWER_WITHIN, answer).await {
        Ok(Ok(answer)) => answer.map_err(RenewalError::Refused)?,
        Ok(Err(_)) | Err(_) => return Err(RenewalError::NoAnswer),
    };
    // Counted even if it cannot be used: it was issued.
    agent.issuance.issued(None);
    state.write_identity(&key_pair::identity_pem(key, &reply)?)?;
    let identity = state.identity()?;
    agent.issuance.issued(identity.time_left(&agent.clock)?);
    agent.observed.certificate_expiry.set(Some(identity.validity()?.not_after));
    Ok(Outcome::Renewed(reply))
}

/// When to renew a certificate: after 60 to 73 % of its lifetime, evenly spread by `random` from 0 to 1, so that agents
/// that were enrolled together do not come back together.
fn due(validity: Validity, random: f64) -> SystemTime {
    let lifetime = validity.not_after.duration_since(validity.not_before).unwrap_or_default();
    validity.not_before + lifetime.mul_f64(0.6 + random.clamp(0.0, 1.0) * 2.0 / 15.0)
}

#[cfg(test)]
mod tests {
    use gw_shared::runtime::Driver;

    use super::*;
    use crate::fake_gateway::{self, Authority, LONG_AGO, NOW};

    #[test]
    fn renewal_is_due_at_two_thirds_of_the_lifetime_more_or_less() {
        let not_before = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let day = Duration::from_secs(24 * 3600);
        let validity = Validity { not_before, not_after: not_before + day };
        let share =
            |random| due(validity, random).duration_since(not_before).unwrap().as_secs_f64() / day.as_secs_f64();
        let close = |found: f64, expected: f64| (found - expected).abs() < 1e-6;
        assert!(close(share(0.5), 2.0 / 3.0) && close(share(0.0), 0.6) && close(share(7.0), 0.6 + 2.0 / 15.0));
        let backwards = Validity { not_before, not_after: not_before - day };
        assert_eq!(due(backwards, 0.5), not_before, "at once, whatever it is");
    }

    #[test]
    fn the_gateways_clock_decides_what_is_due() {
        let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
        let agent = fake_gateway::agent(directory.path(), &authority, &authority.identity_pem(LONG_AGO), 0);
        let issued = agent.config.state.identity().unwrap().validity().unwrap().not_before;
        let outcome = || {
            let renewed = async {
                // No tunnel answers, so a renewal request stays on the desk.
                let renewal = std::pin::pin!(async { renew_if_due(&agent, 0.5, &mut None).await });
                match futures_util::future::select(renewal, std::pin::pin!(runtime::yield_now())).await {
                    futures_util::future::Either::Left((outcome, _)) => Some(outcome.unwrap()),
                    futures_util::future::Either::Right(_) => None,
                }
            };
            Driver::choose().unwrap().block_on(renewed).unwrap()
        };
        // By our clock it expired years ago; the gateway issued it an hour ago.
        agent.clock.set(issued + Duration::from_hours(1), SystemTime::now());
        assert!(matches!(outcome(), Some(Outcome::NotDue(_))));
        assert_eq!(agent.desk.take_request(), None);
        // By the gateway's clock, too.
        agent.clock.set(SystemTime::now(), SystemTime::now());
        assert!(outcome().is_none() && agent.desk.take_request().is_some());
        // One was issued just now.
        agent.issuance.issued(None);
        assert!(matches!(outcome(), Some(Outcome::NotDue(_))));
    }

    #[test]
    fn a_due_certificate_is_replaced_with_its_key_and_a_fresh_one_is_left_alone() {
        let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
        let agent = fake_gateway::agent(directory.path(), &authority, &authority.identity_pem(LONG_AGO), 0);
        let before = agent.config.state.identity().unwrap();
        let mut key = None;
        // Stands for a tunnel: refuses first, then answers as the gateway does.
        let answer = |refuse: bool| {
            let csr = agent.desk.take_request().unwrap();
            agent.desk.answer(if refuse { Err("later".into()) } else { Ok(authority.certify(&csr, NOW)) });
        };
        Driver::choose()
            .unwrap()
            .block_on(async {
                let (refused, ()) = futures_util::join!(renew_if_due(&agent, 0.5, &mut key), async { answer(true) });
                assert!(matches!(refused, Err(RenewalError::Refused(_))));
                assert!(key.is_some(), "kept for the next try");
                let (renewed, ()) = futures_util::join!(renew_if_due(&agent, 0.5, &mut key), async { answer(false) });
                assert!(matches!(renewed, Ok(Outcome::Renewed(_))));
                assert!(matches!(renew_if_due(&agent, 0.5, &mut key).await, Ok(Outcome::NotDue(_))));
            })
            .unwrap();
        let after = agent.config.state.identity().unwrap();
        assert_ne!(after.certificate, before.certificate);
        assert_ne!(after.key.secret_der(), before.key.secret_der(), "a new key");
        assert_eq!(agent.desk.take_request(), None);
    }
}
