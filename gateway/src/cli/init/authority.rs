//! Answers about the ACME authority that issues the certificate.

use std::net::SocketAddr;
use std::path::PathBuf;

use gw_interface::config::{parse_contact, parse_dns_server};
use gw_shared::command::Failure;

use super::answers::{Dialogue, Question, full_path};

/// The ACME authority that issues the certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AcmeAnswers {
    /// Mail address for the authority.
    pub(super) contact: String,
    /// Its directory; that of Let's Encrypt without.
    pub(super) directory: Option<String>,
    /// Proofs in DNS, for a certificate of all names. Without, it is for the apex alone.
    pub(super) updates: Option<DnsUpdates>,
}

/// A DNS server that takes signed updates (RFC 2136).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DnsUpdates {
    pub(super) server: SocketAddr,
    /// Name of the TSIG key.
    pub(super) key_name: String,
    /// Absolute path of its file.
    pub(super) key_file: PathBuf,
}

impl AcmeAnswers {
    /// Takes the options, and asks for the rest if there is a dialogue. `None` without an
    /// authority.
    pub(super) fn collect(
        contact: Option<String>,
        directory: Option<String>,
        dialogue: &mut Option<&mut Dialogue<'_>>,
    ) -> Result<Option<Self>, Failure> {
        let contact = match (contact, &mut *dialogue) {
            (None, Some(dialogue)) => dialogue.contact()?,
            (given, _) => given,
        };
        let Some(contact) = contact else {
            return Ok(None);
        };
        let updates = match dialogue {
            Some(dialogue) => dialogue.updates()?,
            None => None,
        };
        Ok(Some(Self {
            contact,
            directory,
            updates,
        }))
    }
}

impl Dialogue<'_> {
    /// Asks for the mail address for an authority. `None` without an authority.
    fn contact(&mut self) -> Result<Option<String>, Failure> {
        let question = Question {
            option: "--acme-contact",
            text: "Mail address for Let's Encrypt, which issues the certificate and whose terms \
                   this accepts (empty: no authority)",
            default: None,
        };
        self.ask(&question, |text| match text {
            "" => Ok(None),
            text => parse_contact(text)
                .map(Some)
                .ok_or_else(|| "it must be a mail address, such as admin@example.com".to_owned()),
        })
    }

    /// Asks for the DNS server that takes the proofs. `None` for a certificate of the apex alone.
    fn updates(&mut self) -> Result<Option<DnsUpdates>, Failure> {
        const OPTION: &str = "acme.rfc2136";
        let question = |text| Question {
            option: OPTION,
            text,
            default: None,
        };
        let server = question(
            "DNS server that takes signed updates for REGION.DOMAIN (empty: a certificate for that \
             name alone, without those below it)",
        );
        let server = self.ask(&server, |text| match text {
            "" => Ok(None),
            text => parse_dns_server(text)
                .map(Some)
                .ok_or_else(|| "it must be ADDRESS or ADDRESS:PORT, such as 192.0.2.53".to_owned()),
        })?;
        let Some(server) = server else {
            return Ok(None);
        };
        let is_given = |text: &str| match text {
            "" => Err("it must not be empty; `tsig-keygen NAME` makes a key".to_owned()),
            text => Ok(text.to_owned()),
        };
        let key_name = self.ask(&question("Name of the TSIG key"), is_given)?;
        let key_file = self.ask(
            &question("File of this key, as tsig-keygen writes it"),
            is_given,
        )?;
        Ok(Some(DnsUpdates {
            server,
            key_name,
            key_file: full_path(OPTION, key_file.as_ref())?,
        }))
    }
}
