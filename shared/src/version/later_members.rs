//! Members of JSON objects that a later version has added. Programs of two versions share files and
//! exchange messages during an upgrade and after a roll-back, so what programs store or exchange
//! may have members that this version does not know: they are ignored, and kept where this version
//! writes an object back. What people write refuses them, because they are mistakes there.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The members of an object that this version does not know, to be written back as they are. For a
/// field with `#[serde(flatten)]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LaterMembers(Map<String, Value>);

#[cfg(test)]
#[path = "../../tests/later_member/mod.rs"]
mod later_member;

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::Ed25519KeyPair;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::later_member::pass;
    use crate::error_body::ErrorBody;
    use crate::id::{AgentId, AuthorityId, EnrollmentId};
    use crate::identity::enrollment::{
        CertificateReply, CsrRequest, EnrollReply, EnrollRequest, EnrollmentStatus, StatusReply,
    };
    use crate::identity::program::{ReleaseKey, SignedProgram, TARGET, UpdateReport, UpdateState};
    use crate::tunnel::control::{BackendHealth, ToAgent, ToGateway};
    use crate::version::Version;

    const NONE: [&str; 0] = [];

    #[test]
    fn messages_of_an_enrollment_take_a_member_of_a_later_version() {
        let (token, name, version) = ("token".into(), "name".into(), "1.2.3".into());
        let request = EnrollRequest {
            token,
            name,
            version,
        };
        assert_eq!(pass(&request, &[]), NONE);
        let reply = EnrollReply {
            enrollment_id: EnrollmentId::random(),
            agent_id: AgentId::random(),
            enrollment_secret: "secret".into(),
            status: EnrollmentStatus::Pending,
            poll_after_seconds: 1,
        };
        assert_eq!(pass(&reply, &[]), NONE);
        let status = StatusReply {
            status: EnrollmentStatus::Approved,
            agent_id: Some(AgentId::random()),
            poll_after_seconds: 1,
        };
        assert_eq!(pass(&status, &[]), NONE);
        let request = CsrRequest {
            csr: "request".into(),
            agent_id: Some(AgentId::random()),
        };
        assert_eq!(pass(&request, &[]), NONE);
        assert_eq!(pass(&certificate(), &[]), NONE);
        let refusal = r#"{"error":{"code":"GW_OVERLOADED","message":"m","request_id":"r"}}"#;
        let refusal: ErrorBody = serde_json::from_str(refusal).unwrap();
        assert_eq!(pass(&refusal, &[]), NONE);
    }

    #[test]
    fn control_messages_take_a_member_of_a_later_version() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let program = SignedProgram::sign(Version::own(), TARGET, b"program", &pair);
        // A signed program is stored, and written back with all of its members.
        assert_eq!(pass(&program, &[]), [""]);
        let programs = vec![program];
        assert_eq!(pass(&ToAgent::Programs { programs }, &[]), ["/programs/0"]);
        for message in [
            ToAgent::Ready {
                agent_id: "ag_1".into(),
                generation: 1,
            },
            ToAgent::Drain,
            ToAgent::Drained,
            ToAgent::Replaced,
            ToAgent::Services { hostnames: vec![] },
            ToAgent::Certificate(certificate()),
            ToAgent::RenewalRefused {
                message: "m".into(),
            },
            ToAgent::OtherTunnels {
                exist: true,
                retries: false,
            },
            ToAgent::RenewalWanted {
                authority: AuthorityId::new(&"0".repeat(40)).unwrap(),
                within_seconds: 1,
            },
            ToAgent::Ended { reason: "r".into() },
        ] {
            assert_eq!(pass(&message, &[]), NONE, "{message:?}");
        }
        for message in [
            ToGateway::Statistics {
                slots: 1,
                slots_in_use: 0,
                backend_connections: 0,
                backend: BackendHealth::Healthy,
                standby: true,
            },
            ToGateway::Drain,
            ToGateway::Renew { csr: "c".into() },
            ToGateway::Update(UpdateReport {
                state: UpdateState::Failed,
                release_keys: Some(ReleaseKey::of(&pair).into()),
                version: Some(Version::own()),
                error: Some("e".into()),
            }),
        ] {
            assert_eq!(pass(&message, &[]), NONE, "{message:?}");
        }
    }

    #[test]
    fn a_signature_over_a_member_of_a_later_version_is_refused() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let signed = SignedProgram::sign(Version::own(), TARGET, b"program", &pair);
        let mut later = serde_json::to_value(&signed).unwrap();
        later["expires_at"] = 1.into();
        let unsigned: SignedProgram = serde_json::from_value(later.clone()).unwrap();
        let keys = ReleaseKey::of(&pair).into();
        assert_eq!(unsigned.verify(&keys), Ok(()));
        let SignedProgram {
            version,
            target,
            size,
            sha256,
            ..
        } = &signed;
        let members = format!("{version}\0{target}\0{size}\0{sha256}");
        let message = format!("gw-agent program\0{members}\0\0expires 1");
        let signature = pair.sign(message.as_bytes());
        later["signature"] = STANDARD.encode(signature).into();
        let signed: SignedProgram = serde_json::from_value(later).unwrap();
        assert!(signed.verify(&keys).is_err());
    }

    fn certificate() -> CertificateReply {
        CertificateReply {
            certificate: "c".into(),
            chain: "c".into(),
            not_after: "2030-01-01T00:00:00Z".into(),
            agent_id: AgentId::random(),
            services: vec!["a".into()],
        }
    }
}
