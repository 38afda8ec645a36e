//! Requests of agents without a tunnel: enrollment and certificate signing (`POST /enroll`, `GET
//! /enroll/status`, `POST /csr`).

use std::net::IpAddr;

use gw_base::error::Error;
use gw_base::strict_json;
use gw_interface::auth::bearer;
use gw_interface::control_plane::{AgentProof, ControlPlane};
use gw_shared::http::{Fields, RequestHead};
use gw_shared::identity::enrollment::{CsrRequest, EnrollRequest};
use gw_shared::identity::secret::{Secret, SecretHash};
use gw_store::Directory;
use http::{Method, Response, StatusCode, header};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::body::{self, Unanswered};
use super::limits::ApexBucket;
use super::{Apex, json, only};
use crate::http_message::RequestBody;

impl Apex {
    pub(super) async fn enroll(
        &self,
        request: &RequestHead,
        client: IpAddr,
        body: &mut impl RequestBody,
    ) -> Result<Response<Vec<u8>>, Unanswered> {
        // A token proves no agent: it enrolls one, which has a bucket of its own from then on.
        let bucket = ApexBucket::Enrollment(client);
        let enrollment: EnrollRequest = self.charge_and_read(request, bucket, body).await?;
        let reply = self
            .change(move |control| control.enroll(&enrollment))
            .await?;
        Ok(answer(StatusCode::CREATED, &reply))
    }

    pub(super) async fn enrollment_status(
        &self,
        request: &RequestHead,
        client: IpAddr,
    ) -> Result<Response<Vec<u8>>, Error> {
        only(&Method::GET, "GET, HEAD", request)?;
        self.charge(self.bucket_of(request, client)).await?;
        let id = enrollment_id(request)
            .ok_or_else(|| Error::InvalidRequest("?enrollment_id= is missing".to_owned()))?;
        let secret = enrollment_secret(&request.headers).ok_or(Error::EnrollmentInvalid)?;
        let reply = self
            .executor
            .run(move |control| control.enrollment_status(&id, &secret))
            .await?;
        Ok(answer(StatusCode::OK, &reply))
    }

    pub(super) async fn sign(
        &self,
        request: &RequestHead,
        client: IpAddr,
        body: &mut impl RequestBody,
    ) -> Result<Response<Vec<u8>>, Unanswered> {
        // A request that an old key signs is charged to the address: a signature costs more to
        // check than a secret.
        let bucket = self.bucket_of(request, client);
        let CsrRequest { csr, agent_id } = self.charge_and_read(request, bucket, body).await?;
        let proof = match (enrollment_secret(&request.headers), agent_id) {
            (Some(_), Some(_)) => {
                let message =
                    "send the bearer of an enrollment or an agent_id, not both".to_owned();
                return Err(Error::InvalidRequest(message).into());
            }
            (Some(secret), None) => AgentProof::Enrollment {
                id: enrollment_id(request),
                secret,
            },
            (None, Some(agent_id)) => AgentProof::OldKey(agent_id),
            (None, None) => return Err(Error::EnrollmentInvalid.into()),
        };
        let reply = self
            .change(move |control| control.sign(&proof, &csr))
            .await?;
        Ok(answer(StatusCode::OK, &reply))
    }

    /// Makes a change of the records, and waits until the other nodes use it: the agent's next
    /// request may arrive at any of them.
    async fn change<T: Send + 'static>(
        &self,
        change: impl FnOnce(&dyn ControlPlane) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, position) = self
            .executor
            .run(move |control| Ok((change(control)?, control.position())))
            .await?;
        if let Some(nodes) = &self.other_nodes {
            nodes.keep(position).await;
        }
        Ok(reply)
    }

    /// The bucket of a request: of its agent if it has the secret of an enrollment, else of its
    /// address. A worker may not know an agent that has just enrolled.
    fn bucket_of(&self, request: &RequestHead, client: IpAddr) -> ApexBucket {
        bucket_of(&self.directory.get(), &request.headers, client)
    }

    /// Checks the method and the limit, then reads the body as JSON.
    async fn charge_and_read<T: DeserializeOwned>(
        &self,
        request: &RequestHead,
        bucket: ApexBucket,
        body: &mut impl RequestBody,
    ) -> Result<T, Unanswered> {
        only(&Method::POST, "POST", request)?;
        self.charge(bucket).await?;
        let body = body::read(body).await?;
        Ok(strict_json::parse(&body)
            .map_err(|error| Error::InvalidRequest(format!("request body: {error}")))?)
    }
}

fn bucket_of(directory: &Directory, headers: &Fields, client: IpAddr) -> ApexBucket {
    let secret = enrollment_secret(headers);
    let agent = secret.and_then(|secret| {
        directory
            .enrolled(&SecretHash::of(secret.reveal()))
            .cloned()
    });
    agent.map_or(ApexBucket::Enrollment(client), ApexBucket::Agent)
}

/// `?enrollment_id=…`
fn enrollment_id(request: &RequestHead) -> Option<String> {
    let query = request.target.query().unwrap_or_default();
    let (_, id) =
        form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "enrollment_id")?;
    Some(id.into_owned())
}

/// `Authorization: Bearer {enrollment_secret}`
fn enrollment_secret(headers: &Fields) -> Option<Secret> {
    headers
        .get(header::AUTHORIZATION)
        .and_then(bearer)
        .map(|secret| Secret::new(secret.to_owned()))
}

fn answer(status: StatusCode, reply: &impl Serialize) -> Response<Vec<u8>> {
    // Structs of strings always serialize.
    json(
        status,
        serde_json::to_vec(reply).unwrap_or_default(),
        "no-store",
    )
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use gw_base::clock::Timestamp;
    use gw_base::service::hostname::Region;
    use gw_base::service::rate::Rate;
    use gw_shared::id::{AgentId, EnrollmentId};
    use gw_shared::identity::enrollment::EnrollmentStatus;
    use gw_store::{AgentRecord, EnrollmentRecord, Records, StoredRecord};
    use http::HeaderValue;

    use super::super::limits::ApexLimits;
    use super::*;

    const WAITING: u64 = 20;

    /// Records with agents that wait for their approval, each with the secret of its number.
    fn waiting() -> Directory {
        let agents = (0..WAITING).map(|number| {
            let secret = SecretHash::of(&format!("secret {number}"));
            let enrollment = EnrollmentRecord {
                id: EnrollmentId::random(),
                secret,
                expires_at: Timestamp(i64::MAX),
                later: Default::default(),
            };
            StoredRecord::Agent(AgentRecord {
                id: AgentId::random(),
                account: gw_shared::id::AccountId::new("acme").unwrap(),
                name: "agent".to_owned(),
                services: Default::default(),
                status: EnrollmentStatus::Pending,
                standby: false,
                ephemeral: false,
                absent_since: None,
                enrollment_token: None,
                version: None,
                enrollment: Some(Box::new(enrollment)),
                key: None,
                previous_key: None,
                certificate_not_after: None,
                authority: None,
                created_at: Timestamp(1),
                later: Default::default(),
            })
        });
        Directory::new(
            &Records::from_iter(agents),
            &Region::new("eu1", "example.com"),
            1,
        )
    }

    fn with_secret(secret: &str) -> Fields {
        let value = HeaderValue::try_from(format!("Bearer {secret}")).unwrap();
        Fields::from_iter([(header::AUTHORIZATION, value)])
    }

    #[test]
    fn agents_behind_one_address_wait_for_their_approval_unlimited_and_guesses_are_limited() {
        let directory = waiting();
        let client = IpAddr::from([192, 0, 2, 1]);
        let per_minute = Rate::new(60, 60).unwrap();
        let limits = ApexLimits::new(per_minute, per_minute);
        let start = Instant::now();
        let take = |headers: &Fields, at: u64| {
            limits.take(
                bucket_of(&directory, headers, client),
                start + Duration::from_secs(at),
            )
        };
        let mut polls = 0;
        let mut guesses_admitted = 0;
        for at in 0..30 * 60 {
            if at % 5 == 0 {
                for number in 0..WAITING {
                    take(&with_secret(&format!("secret {number}")), at).unwrap();
                    polls += 1;
                }
            }
            // A stranger at the same address guesses twenty times a second.
            for guess in 0..20 {
                guesses_admitted +=
                    u64::from(take(&with_secret(&format!("secret {at} {guess}")), at).is_ok());
            }
            assert!(
                take(&Fields::new(), at).is_err() || at < 3,
                "without a secret, after the guesses"
            );
        }
        assert_eq!(polls, WAITING * 30 * 12);
        assert!(
            (30 * 60..=31 * 60).contains(&guesses_admitted),
            "{guesses_admitted}"
        );

        // An agent that asks without pause is limited by itself.
        let at = 30 * 60;
        let hasty = (0..1000)
            .filter(|_| take(&with_secret("secret 7"), at).is_ok())
            .count();
        assert!((50..=60).contains(&hasty), "{hasty}");
        take(&with_secret("secret 8"), at).unwrap();
    }

    #[test]
    fn only_the_secret_of_an_enrollment_is_charged_to_its_agent() {
        let directory = waiting();
        let client = IpAddr::from([192, 0, 2, 1]);
        let bucket = |headers: Fields| bucket_of(&directory, &headers, client);
        assert!(matches!(
            bucket(with_secret("secret 3")),
            ApexBucket::Agent(_)
        ));
        let basic = Fields::from_iter([(
            header::AUTHORIZATION,
            HeaderValue::from_static("Basic secret 3"),
        )]);
        for other in [
            Fields::new(),
            basic,
            with_secret("secret"),
            with_secret("secret 20"),
            with_secret(""),
        ] {
            assert_eq!(bucket(other), ApexBucket::Enrollment(client));
        }
    }
}
