//! `gw-gateway certificate`

use clap::Subcommand;
use gw_control_plane::control::CertificateView;

use crate::cli::client::output::{CommandError, Listed, Output, Shown, word};

#[derive(Subcommand)]
pub(crate) enum CertificateCommand {
    /// List the certificates that an ACME authority issues, with their expiry and the last failure.
    List,
    /// Order a new certificate now. The one before stays in use until it is there.
    Renew,
}

impl CertificateCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::List => output.list::<CertificateView>("/certificates", &[], None),
            Self::Renew => output.act::<CertificateView>("/certificates/renew", None),
        }
    }
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
