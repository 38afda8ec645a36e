//! `gw-gateway domain`

use clap::Subcommand;
use gw_control_plane::control::{DnsRecordView, DomainView, NewDomain};
use gw_shared::id::{AccountId, DomainName, ServiceId};

use crate::cli::client::output::{CommandError, Listed, Output, Shown, or_dash, word};

#[derive(Subcommand)]
pub(crate) enum DomainCommand {
    /// Add a domain of the customer to a service, and print the DNS record that proves control over
    /// it.
    Add {
        account: AccountId,
        service: ServiceId,
        /// The name, in lower case, with A-labels (xn--) for other letters.
        domain: DomainName,
    },
    /// List the own domains of an account.
    List { account: AccountId },
    /// Look up in DNS now whether the account controls the domain, and show it.
    Check {
        account: AccountId,
        domain: DomainName,
    },
    /// Remove a domain from its service.
    Remove {
        account: AccountId,
        domain: DomainName,
    },
}

impl DomainCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Add {
                account,
                service,
                domain,
            } => output.create::<DomainView>(
                &format!("/accounts/{account}/services/{service}/domains"),
                &NewDomain {
                    name: domain.to_string(),
                    managed_by: None,
                },
            ),
            Self::List { account } => {
                output.list::<DomainView>(&format!("/accounts/{account}/domains"), &[], None)
            }
            Self::Check { account, domain } => {
                output.act::<DomainView>(&format!("{}/check", path(&account, &domain)), None)
            }
            Self::Remove { account, domain } => output.delete(&path(&account, &domain)),
        }
    }
}

/// Path of a domain in the administration API.
pub(super) fn path(account: &AccountId, domain: &DomainName) -> String {
    format!("/accounts/{account}/domains/{domain}")
}

impl Shown for DomainView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let record = |kind: &str, DnsRecordView { name, value }: &DnsRecordView| {
            format!("{name} {kind} {value}")
        };
        let certificate = self.certificate.as_ref();
        let txt_label = match self.cname_proves {
            true => "or, without CNAME",
            false => "and, as proof",
        };
        vec![
            ("domain", self.name.to_string()),
            ("service", self.service.to_string()),
            ("status", word(self.status)),
            (
                "certificate",
                or_dash(certificate.map(|it| word(it.source)).as_ref()),
            ),
            (
                "certificate until",
                or_dash(certificate.map(|it| &it.not_after)),
            ),
            ("since", self.since.clone()),
            ("served until", or_dash(self.served_until.as_ref())),
            ("DNS record", record("CNAME", &self.cname)),
            (txt_label, record("TXT", &self.txt)),
            ("finding", or_dash(self.finding.as_ref())),
            ("failed orders", self.failures.to_string()),
            ("last failure", or_dash(self.last_failure.as_ref())),
        ]
    }
}

impl Listed for DomainView {
    const PLURAL: &'static str = "domains";
    const COLUMNS: usize = 5;
}
