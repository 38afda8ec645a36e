//! Reasons for the end of a tunnel, as log, metrics and the control message `ended` carry them.

/// Defines [`CutReason`] with the text of each reason beside its name.
macro_rules! reasons {
    ($($(#[$attribute:meta])* $name:ident = $text:literal,)*) => {
        /// Reason for the end of a tunnel, as the gateway knows it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum CutReason {
            $($(#[$attribute])* $name,)*
        }

        impl CutReason {
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

reasons! {
    /// The agent has closed the connection without draining first.
    AgentClosed = "agent_closed",
    AgentDrained = "agent_drained",
    /// A newer tunnel of the same agent has replaced this one.
    Replaced = "replaced",
    /// Another node owns the service now.
    Moved = "moved",
    GatewayDrains = "gateway_drains",
    /// The gateway stops, and its time to drain is over.
    GatewayStops = "gateway_stops",
    /// The connection has ended without `close_notify`: agent, machine or path were lost.
    ConnectionLost = "connection_lost",
    /// Nothing was received for [`super::heartbeat::DEAD_AFTER`].
    Silent = "silent",
    Violation = "protocol_violation",
    /// Too many frames without content.
    Flood = "flood",
    /// The agent is revoked or deleted.
    AgentRevoked = "agent_revoked",
    CertificateExpired = "certificate_expired",
    ServiceDeleted = "service_deleted",
    /// The service is no longer assigned to the agent.
    NotAssigned = "service_not_assigned",
    NoHello = "no_hello",
    InvalidMessage = "invalid_message",
    TooManyMessages = "too_many_messages",
    /// Too many bytes of control messages wait for the agent.
    MessagesNotRead = "messages_not_read",
    /// The tunnel was to be registered after a newer one of the same agent.
    NewerTunnel = "newer_tunnel",
    TunnelLimit = "tunnel_limit",
}

impl CutReason {
    /// Parses the text of a reason; `None` if there is no such reason.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.as_str() == text)
    }

    /// What the administrator of the agent can do. `None` if there is nothing to do, or if the
    /// agent cannot be told.
    pub const fn advice(self) -> Option<&'static str> {
        const REPORT: &str = "the agent broke the tunnel protocol: install the version of the \
                              gateway, and report the error if it occurs again";
        Some(match self {
            Self::AgentRevoked => {
                "an administrator has revoked this agent: enroll it again with a new token"
            }
            Self::CertificateExpired => {
                "the agent's certificate has expired: check the agent's clock; the agent requests \
                 a new certificate by itself within 30 days, after that enroll it again"
            }
            Self::ServiceDeleted => {
                "an administrator has deleted the service: stop this agent, or assign it another \
                 service"
            }
            Self::NotAssigned => {
                "the service is no longer assigned to this agent: ask an administrator to assign \
                 it again"
            }
            Self::Violation
            | Self::Flood
            | Self::NoHello
            | Self::InvalidMessage
            | Self::TooManyMessages => REPORT,
            Self::NewerTunnel => {
                "a second process may run with the same identity: enroll each agent on its own"
            }
            Self::TunnelLimit => {
                "the service has as many tunnels as it may have: stop other agents of this service"
            }
            Self::AgentClosed
            | Self::AgentDrained
            | Self::Replaced
            | Self::Moved
            | Self::GatewayDrains
            | Self::GatewayStops
            | Self::ConnectionLost
            | Self::Silent
            | Self::MessagesNotRead => return None,
        })
    }

    /// Whether the agent may open another tunnel of the service.
    pub const fn agent_may_return(self) -> bool {
        !matches!(
            self,
            Self::AgentRevoked | Self::ServiceDeleted | Self::NotAssigned
        )
    }

    /// Whether the agent has broken the protocol of the tunnel, or one of its limits.
    pub const fn is_misbehavior(self) -> bool {
        matches!(
            self,
            Self::Violation
                | Self::Flood
                | Self::NoHello
                | Self::InvalidMessage
                | Self::TooManyMessages
                | Self::MessagesNotRead
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_stable_and_parse_back() {
        let texts: Vec<_> = CutReason::ALL
            .iter()
            .map(|reason| reason.as_str())
            .collect();
        let stable = [
            "agent_closed",
            "agent_drained",
            "replaced",
            "moved",
            "gateway_drains",
            "gateway_stops",
            "connection_lost",
            "silent",
            "protocol_violation",
            "flood",
            "agent_revoked",
            "certificate_expired",
            "service_deleted",
            "service_not_assigned",
            "no_hello",
            "invalid_message",
            "too_many_messages",
            "messages_not_read",
            "newer_tunnel",
            "tunnel_limit",
        ];
        assert_eq!(texts, stable);
        for &reason in CutReason::ALL {
            assert_eq!(CutReason::parse(reason.as_str()), Some(reason));
        }
        assert_eq!(CutReason::parse("a reason of a later version"), None);
    }

    #[test]
    fn agents_without_the_service_do_not_return_and_are_told_why() {
        let mut gone = CutReason::ALL.to_vec();
        gone.retain(|reason| !reason.agent_may_return());
        let revoked = CutReason::AgentRevoked;
        assert_eq!(
            gone,
            [revoked, CutReason::ServiceDeleted, CutReason::NotAssigned]
        );
        assert!(gone.iter().all(|reason| reason.advice().is_some()));
    }
}
