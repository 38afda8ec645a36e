use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};

use gw_shared::id::{AgentId, EnrollmentId};
use gw_shared::identity::enrollment::{EnrollReply, StatusReply};
use gw_shared::identity::secret::Secret;

use super::*;
use crate::fake_gateway::{self, APEX, Authority, HOSTNAME, NOW, Request, json, refusal};

const TOKEN: &str = "gw_et_0123456789abcdef.secret";

fn enroll(options: EnrollmentOptions) -> Result<Enrolled, EnrollError> {
    super::enroll(options, |_| None)
}

fn ensure_enrolled(options: EnrollmentOptions) -> Result<(), EnrollError> {
    super::ensure_enrolled(options, |_| None)
}

/// A gateway on loopback, the requests it received, and its authority in a file.
struct Region {
    directory: tempfile::TempDir,
    port: u16,
    requests: mpsc::Receiver<String>,
}

impl Region {
    /// A gateway that answers `GET /enroll/status` with `status` and accepts all other requests.
    fn with_status(mut status: impl FnMut() -> String + Send + 'static) -> Self {
        Self::answering(move |request, authority| match path(request) {
            "/enroll" => {
                let reply = EnrollReply {
                    enrollment_id: EnrollmentId::random(),
                    agent_id: AgentId::random(),
                    enrollment_secret: "for the agent".into(),
                    status: EnrollmentStatus::Pending,
                    poll_after_seconds: 1,
                };
                json(201, "", &reply)
            }
            "/enroll/status" => status(),
            _ => {
                let field = "authorization: Bearer for the agent\r\n";
                assert!(request.head.contains(field));
                let request: CsrRequest = serde_json::from_slice(&request.body).unwrap();
                json(200, "", &authority.certify(&request.csr, NOW))
            }
        })
    }

    fn answering(mut answer: impl FnMut(&Request, &Authority) -> String + Send + 'static) -> Self {
        let authority = Arc::new(Authority::new());
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ca.pem"), &authority.pem).unwrap();
        let (seen, requests) = mpsc::channel();
        let port = fake_gateway::serve(&Arc::clone(&authority), move |request| {
            seen.send(path(request).to_owned()).unwrap();
            answer(request, &authority)
        });
        Self {
            directory,
            port,
            requests,
        }
    }

    fn state_dir(&self) -> std::path::PathBuf {
        self.directory.path().join("state")
    }

    fn options(&self) -> EnrollmentOptions {
        EnrollmentOptions {
            state_dir: self.state_dir(),
            gateway: Some(format!("https://{APEX}")),
            token: Some(TokenSource::Text(Secret::new(TOKEN.into()))),
            ca_file: Some(self.directory.path().join("ca.pem")),
            connect_to: Some(("127.0.0.1".into(), self.port)),
            ..EnrollmentOptions::default()
        }
    }

    /// The names of the files of the state folder.
    fn files(&self) -> BTreeSet<String> {
        let entries = std::fs::read_dir(self.state_dir()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string());
        names.map(Result::unwrap).collect()
    }

    fn requests(&self) -> Vec<String> {
        self.requests.try_iter().collect()
    }
}

fn path(request: &Request) -> &str {
    request.head.split(['?', ' ']).nth(1).unwrap()
}

fn status(status: EnrollmentStatus) -> String {
    let agent_id = (status == EnrollmentStatus::Approved).then(AgentId::random);
    let reply = StatusReply {
        status,
        agent_id,
        poll_after_seconds: 1,
    };
    json(200, "", &reply)
}

#[test]
fn enrollment_creates_a_complete_state_folder() {
    let region = Region::with_status(|| status(EnrollmentStatus::Approved));
    let enrolled = enroll(region.options()).unwrap();
    assert_eq!(region.requests(), ["/enroll", "/enroll/status", "/csr"]);
    let enrollment = enrolled.state.enrollment().unwrap();
    assert_eq!(enrollment, enrolled.enrollment);
    assert_eq!(enrollment.gateway_name, APEX);
    assert_eq!(enrollment.gateway_host, "127.0.0.1");
    assert_eq!(enrollment.gateway_port, region.port);
    assert_eq!(enrollment.services, [HOSTNAME]);
    assert_eq!(enrolled.state.identity().unwrap().chain.len(), 1);
    let files = ["agent.json", "gateway-ca.crt", "identity.pem"];
    assert!(region.files().iter().eq(files));
    // A second enrollment needs --force.
    assert!(matches!(
        enroll(region.options()),
        Err(EnrollError::Usage(_))
    ));
}

#[test]
fn interrupted_enrollment_is_resumed_with_and_without_its_token() {
    // In place of a crash: an answer that ends `enroll` with an error but is no refusal.
    let mut polls = 0;
    let region = Region::with_status(move || {
        polls += 1;
        match polls {
            1 | 2 => "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]".into(),
            _ => status(EnrollmentStatus::Approved),
        }
    });
    let assert_not_understood = |result: Result<Enrolled, EnrollError>| {
        assert!(matches!(
            result,
            Err(EnrollError::Gateway(GatewayError::NotUnderstood(_)))
        ));
    };
    assert_not_understood(enroll(region.options()));
    assert!(region.files().iter().eq(["enrollment.json"]));
    let state_dir_only = EnrollmentOptions {
        state_dir: region.state_dir(),
        ..EnrollmentOptions::default()
    };
    assert_not_understood(enroll(state_dir_only));
    let enrolled = enroll(region.options()).unwrap();
    assert_eq!(enrolled.enrollment.gateway_port, region.port);
    let polls = ["/enroll/status"; 3];
    let requests = [&["/enroll"], &polls[..], &["/csr"]].concat();
    assert_eq!(region.requests(), requests);
}

#[test]
fn enrollment_waits_for_approval_and_through_outages() {
    let mut answers = vec![
        status(EnrollmentStatus::Approved),
        refusal(429, "retry-after: 0\r\n", "GW_RATE_LIMIT_EXCEEDED"),
        refusal(502, "", ""),
        status(EnrollmentStatus::Pending),
    ];
    let region = Region::with_status(move || answers.pop().unwrap());
    enroll(region.options()).unwrap();
    assert_eq!(region.requests().len(), 1 + 4 + 1);
}

#[test]
fn refusals_are_errors_with_a_remedy() {
    let used = Region::answering(|_, _| refusal(401, "", "GW_ENROLLMENT_TOKEN_INVALID"));
    let error = enroll(used.options()).unwrap_err();
    assert!(matches!(error, EnrollError::Token(_)), "{error}");
    let older = Region::answering(|_, _| refusal(426, "", "GW_VERSION_MISMATCH"));
    let error = enroll(older.options()).unwrap_err().to_string();
    assert!(error.contains("GW_VERSION_MISMATCH"), "{error}");
    let without_authority = EnrollmentOptions {
        ca_file: None,
        ..used.options()
    };
    let unknown = enroll(without_authority).unwrap_err().to_string();
    assert!(unknown.contains("--ca-file"), "{unknown}");
}

#[test]
fn a_rejected_enrollment_cannot_be_resumed() {
    let rejected = Region::with_status(|| status(EnrollmentStatus::Revoked));
    assert!(matches!(
        enroll(rejected.options()),
        Err(EnrollError::Rejected)
    ));
    assert!(rejected.files().is_empty());
}

fn refused(status: u16, retry_after: Option<u64>) -> GatewayError {
    GatewayError::Refused(ErrorReply {
        status: StatusCode::from_u16(status).unwrap(),
        code: None,
        text: String::new(),
        retry_after: retry_after.map(Duration::from_secs),
    })
}

#[test]
fn requests_are_repeated_only_if_that_is_safe_and_useful() {
    for (error, retry_on, expected) in [
        (refused(429, Some(7)), RetryOn::Overload, Some(7000)),
        (refused(503, None), RetryOn::Outage, Some(60_000)),
        // The gateway may have consumed the token, so a second attempt would be refused.
        (GatewayError::Closed, RetryOn::Overload, None),
        (GatewayError::Closed, RetryOn::Outage, Some(500)),
        (refused(401, None), RetryOn::Outage, None),
    ] {
        let pause = pause(&error, retry_on, &mut Backoff::default(), 0.5);
        assert_eq!(pause.map(|pause| pause.as_millis()), expected, "{error}");
    }
}

#[test]
fn a_gateway_that_keeps_refusing_is_asked_less_often_and_never_too_early() {
    let mut backoff = Backoff::default();
    let pauses =
        (0..9).map(|_| pause(&refused(429, Some(5)), RetryOn::Outage, &mut backoff, 1.0).unwrap());
    let seconds: Vec<u64> = pauses.map(|pause| pause.as_secs()).collect();
    assert_eq!(seconds, [5, 5, 5, 8, 16, 32, 64, 120, 120]);
}

#[test]
fn polls_for_an_approval_slow_down() {
    for (requested, waited, expected) in [
        (5, 0, 5),
        (5, 50, 5),
        (5, 100, 10),
        (5, 300, 30),
        (5, 600, 60),
        (5, 86_400, 60),
        (0, 0, 1),
        (90, 86_400, 90),
        (3600, 0, 300),
    ] {
        let pause = poll_pause(Duration::from_secs(requested), Duration::from_secs(waited));
        assert_eq!(pause.as_secs(), expected, "{requested} {waited}");
    }
}

#[test]
fn an_enrolled_agent_is_kept_unless_it_is_of_another_gateway() {
    let region = Region::with_status(|| status(EnrollmentStatus::Approved));
    ensure_enrolled(region.options()).unwrap();
    let state = StateDir::new(region.state_dir());
    let agent_id = state.enrollment().unwrap().agent_id;
    assert_eq!(region.requests(), ["/enroll", "/enroll/status", "/csr"]);

    // Neither the token nor the URL is needed any more.
    ensure_enrolled(region.options()).unwrap();
    ensure_enrolled(EnrollmentOptions {
        state_dir: region.state_dir(),
        ..EnrollmentOptions::default()
    })
    .unwrap();
    for other in ["https://us1.gw.localhost", "https://eu1.gw.localhost:1"] {
        let options = EnrollmentOptions {
            gateway: Some(other.into()),
            connect_to: None,
            ..region.options()
        };
        let error = ensure_enrolled(options).unwrap_err();
        assert!(matches!(error, EnrollError::OtherGateway { .. }), "{error}");
        let error = error.to_string();
        for gateway in [other, &format!("https://{APEX}:{}", region.port)] {
            assert!(error.contains(gateway), "{error}");
        }
    }
    assert_eq!(region.requests(), [""; 0]);
    assert_eq!(state.enrollment().unwrap().agent_id, agent_id);
}
