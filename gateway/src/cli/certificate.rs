//! `gw-gateway certificate`

use std::fs;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use gw_control_plane::control::{CertificateView, DomainView, NewDomainCertificate};
use gw_shared::files;
use gw_shared::id::{AccountId, DomainName};
use gw_shared::identity::secret::Secret;
use serde_json::json;

use super::domain;
use crate::cli::client::output::{CommandError, Listed, Output, Shown, word};

#[derive(Subcommand)]
pub(crate) enum CertificateCommand {
    /// List the certificates that an ACME authority issues for the region, with their expiry and
    /// the last failure.
    List,
    /// Order a new certificate now: of the region, or of an own domain. The one before stays in use
    /// until it is there.
    Renew {
        /// Account of the own domain.
        #[arg(requires = "domain")]
        account: Option<AccountId>,
        /// The own domain, also one with an uploaded certificate.
        domain: Option<DomainName>,
    },
    /// Serve this certificate for an own domain. The gateway orders none for the domain then.
    Upload {
        account: AccountId,
        domain: DomainName,
        /// PEM file with the chain, the certificate of the domain first.
        #[arg(long, value_name = "FILE")]
        certificate: PathBuf,
        /// PEM file with the private key.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
    },
}

impl CertificateCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::List => output.list::<CertificateView>("/certificates", &[], None),
            Self::Renew {
                account: Some(account),
                domain: Some(domain),
            } => {
                let path = format!("{}/certificate/renew", domain::path(&account, &domain));
                output.act::<DomainView>(&path, None)
            }
            Self::Renew { .. } => output.act::<CertificateView>("/certificates/renew", None),
            Self::Upload {
                account,
                domain,
                certificate,
                key,
            } => {
                let new = NewDomainCertificate {
                    chain: read("--certificate", &certificate)?,
                    key: Secret::new(read("--key", &key)?),
                };
                let path = format!("{}/certificate", domain::path(&account, &domain));
                output.act::<DomainView>(&path, Some(&json!(new)))
            }
        }
    }
}

fn read(option: &str, file: &Path) -> Result<String, CommandError> {
    fs::read_to_string(file).map_err(|error| {
        let problem = files::cannot_read(file, &error);
        CommandError::File(format!("{option}: {problem}"))
    })
}

impl Shown for CertificateView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let none = || "-".to_owned();
        vec![
            ("id", self.id.to_string()),
            ("status", word(self.status)),
            ("expires", self.not_after.clone().unwrap_or_else(none)),
            ("failures", self.failures.to_string()),
            ("names", self.names.join(", ")),
            ("directory", self.directory.clone()),
            (
                "last failure",
                self.last_failure.clone().unwrap_or_else(none),
            ),
        ]
    }
}

impl Listed for CertificateView {
    const PLURAL: &'static str = "certificates";
    const COLUMNS: usize = 5;
}
