//! Renewal information (ARI, RFC 9773): the time in which the authority wants a certificate
//! renewed.

use std::time::Duration;

use gw_base::clock::Timestamp;

use super::Orders;
use crate::error::AcmeError;
use crate::limits::{ASK_AGAIN_MIN, RETRY_AFTER_MAX};
use crate::schedule::Window;
use crate::state::{Certificate, State};

/// Answer to the question when a certificate is to be renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenewalInfo {
    /// The authority wants it renewed in this window.
    Window {
        /// The window.
        window: Window,
        /// Time after which the authority is to be asked again.
        ask_again: Duration,
    },
    /// The authority offers no renewal information.
    NotOffered,
}

impl Orders {
    /// Asks when the certificate of `state` is to be renewed.
    pub async fn renewal_info(&self, state: &State) -> Result<RenewalInfo, AcmeError> {
        let certificate = state.certificate.as_ref();
        let id = certificate.and_then(Certificate::id).ok_or_else(|| {
            AcmeError::refused(
                "renewal information: the certificate does not name the key of its authority, \
                 which the question needs; it is renewed by its lifetime",
            )
        })?;
        let account = self.account(state).await?;
        match account.renewal_info(&id).await {
            Ok((info, ask_again)) => {
                let window = Window {
                    start: Timestamp(info.suggested_window.start.unix_timestamp()),
                    end: Timestamp(info.suggested_window.end.unix_timestamp()),
                };
                let ask_again = ask_again.clamp(ASK_AGAIN_MIN, RETRY_AFTER_MAX);
                Ok(RenewalInfo::Window { window, ask_again })
            }
            Err(instant_acme::Error::Unsupported(_)) => Ok(RenewalInfo::NotOffered),
            Err(error) => Err(self.failed("renewal information", &error)),
        }
    }
}
