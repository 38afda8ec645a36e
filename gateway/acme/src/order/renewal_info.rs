//! Renewal information (ARI, RFC 9773): the time in which the authority wants a certificate renewed.

use std::time::Duration;

use gw_base::clock::Timestamp;

use super::Orders;
use crate::error::AcmeError;
use crate::limits::RETRY_AFTER_MAX;
use crate::schedule::Window;
use crate::state::{Certificate, State};

impl Orders {
    /// The window for the certificate of `state`, and the time after which the authority is asked again. `None` if it offers
    /// no renewal information.
    pub async fn renewal_window(
        &self,
        state: &State,
    ) -> Result<Option<(Window, Duration)>, AcmeError> {
        let Some(id) = state.certificate.as_ref().and_then(Certificate::id) else {
            return Ok(None);
        };
        let account = self.account(state).await?;
        match account.renewal_info(&id).await {
            Ok((info, ask_again)) => {
                let window = Window {
                    start: Timestamp(info.suggested_window.start.unix_timestamp()),
                    end: Timestamp(info.suggested_window.end.unix_timestamp()),
                };
                Ok(Some((window, ask_again.min(RETRY_AFTER_MAX))))
            }
            Err(instant_acme::Error::Unsupported(_)) => Ok(None),
            Err(error) => Err(self.failed("renewal information", &error)),
        }
    }
}
