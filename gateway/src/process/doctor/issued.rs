//! Check of the certificate that an ACME authority issues. Its state is in the records of the
//! running gateway, which is asked.

use gw_base::page::Page;
use gw_control_plane::admin_client::AdminAddress;
use gw_control_plane::control::{CertificateStatus, CertificateView};
use gw_interface::config::{AcmeConfig, Config};
use gw_shared::doctor::Examination;
use gw_store::Sealing;

use super::TIME_LIMIT;

const CHECK: &str = "certificate";
/// Bytes of the answer that are read: a page of certificates with the causes of their failures.
const ANSWER_MAX: u64 = 4 << 20;

/// Checks that there is a certificate, that it is renewed in time, and that the last order did not
/// fail.
pub(super) fn examine(out: &mut Examination, config: &Config, acme: &AcmeConfig) {
    let authority = format!(
        "issued by the ACME authority at {}",
        acme.settings.directory
    );
    match certificates(config) {
        Ok(certificates) => {
            for certificate in certificates {
                state(out, &authority, &certificate);
            }
        }
        Err(Unknown::NotRunning) => out.ok(
            CHECK,
            format!("{authority}; the gateway does not run, so that its expiry is not known"),
        ),
        Err(Unknown::Failed(reason)) => out.warning(
            CHECK,
            format!("{authority}; its state is not known: {reason}"),
            "run `doctor` as the user of the gateway, or see `gw-gateway certificate list`",
        ),
    }
}

fn state(out: &mut Examination, authority: &str, certificate: &CertificateView) {
    let names = certificate.names.join(" and ");
    let Some(attention) = &certificate.attention else {
        let end = certificate.not_after.as_deref().unwrap_or_default();
        return out.ok(CHECK, format!("{authority} for {names}, valid until {end}"));
    };
    let found = format!("{authority} for {names}: {attention}");
    let advice = "docs/certificates.md, Troubleshooting, says what to do";
    match certificate.status {
        CertificateStatus::Missing | CertificateStatus::Expired => {
            out.failed(CHECK, found, advice);
        }
        CertificateStatus::Valid | CertificateStatus::Renewing => {
            out.warning(CHECK, found, advice);
        }
    }
}

/// Reason why the state is not known.
enum Unknown {
    NotRunning,
    Failed(String),
}

/// The certificates, by the administration API of the gateway with this configuration.
fn certificates(config: &Config) -> Result<Vec<CertificateView>, Unknown> {
    let failed = |reason: &dyn std::fmt::Display| Unknown::Failed(reason.to_string());
    let address = AdminAddress::of(config, None).map_err(Unknown::Failed)?;
    let settings = ureq::Agent::config_builder().timeout_global(Some(TIME_LIMIT));
    let client = address.agent(settings);
    let file = config.data_dir.join("admin.token");
    // The gateway makes the file at its first start.
    if !file.exists() {
        return Err(Unknown::NotRunning);
    }
    let token = Sealing::load(config.seal_key.as_deref())
        .and_then(|sealing| sealing.read_file(&file))
        .map_err(|error| failed(&error))?;
    let url = format!("{}/api/v1/certificates", address.url);
    let answer = client
        .get(&url)
        .header("Authorization", format!("Bearer {}", token.trim()))
        .call();
    let mut answer = match answer {
        Ok(answer) => answer,
        Err(ureq::Error::Io(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            return Err(Unknown::NotRunning);
        }
        Err(error) => {
            let reason = address.explain(&error).unwrap_or_else(|| error.to_string());
            return Err(Unknown::Failed(format!("{url}: {reason}")));
        }
    };
    let text = answer.body_mut().with_config().limit(ANSWER_MAX);
    let text = text.read_to_string().map_err(|error| failed(&error))?;
    let page: Page<CertificateView> = serde_json::from_str(&text).map_err(|error| {
        Unknown::Failed(format!("{url}: its answer is not as expected: {error}"))
    })?;
    Ok(page.items)
}

#[cfg(test)]
mod tests {
    use gw_shared::doctor::Verdict;
    use serde_json::json;

    use super::super::tests::verdicts;
    use super::*;

    fn view(status: &str, attention: Option<&str>) -> CertificateView {
        let view = json!({
            "id": "region",
            "names": ["eu1.example.com"],
            "directory": "https://a/dir",
            "status": status,
            "not_after": "2030-01-01T00:00:00Z",
            "failures": 0,
            "attention": attention,
        });
        serde_json::from_value(view).unwrap()
    }

    #[test]
    fn the_state_of_an_issued_certificate_decides_the_verdict() {
        for (status, attention, verdict) in [
            ("valid", None, Verdict::Ok),
            ("renewing", None, Verdict::Ok),
            ("renewing", Some("the last order failed"), Verdict::Warning),
            ("missing", Some("there is none yet"), Verdict::Failed),
            ("expired", Some("expired"), Verdict::Failed),
        ] {
            let found = verdicts(|out| state(out, "issued", &view(status, attention)));
            assert_eq!(found[CHECK], verdict, "{status}");
        }
    }
}
