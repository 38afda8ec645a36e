//! `gw-gateway service create --with-key --with-agent`: a service with all that its first request
//! needs.

use std::io::{self, Write};

use clap::{Args, value_parser};
use gw_control_plane::control::{
    BACKEND_PORT, GatewayAddress, Mode, NewAccount, NewCallerSecret, NewEnrollmentToken,
    NewEnrollmentTokenView, NewService, NewServiceKeyView, ServiceView,
};
use gw_shared::id::AccountId;
use http::Method;
use serde_json::{Value, json};

use crate::cli::client::output::{CommandError, Output, write_facts};

/// What is created beside a service.
#[derive(Args)]
pub(crate) struct Access {
    /// Create the account first, unless it exists.
    #[arg(long)]
    create_account: bool,
    /// Also create a service key, and print the command that calls the service.
    #[arg(long)]
    with_key: bool,
    /// Also create an enrollment token, and print the command that runs the agent beside the
    /// backend.
    #[arg(long)]
    with_agent: bool,
    /// Port of the backend in the printed command of the agent.
    #[arg(long, value_name = "PORT", default_value_t = BACKEND_PORT, requires = "with_agent",
        value_parser = value_parser!(u16).range(1..))]
    backend_port: u16,
    /// URL by which agents and callers reach the gateway; by default the apex of the region with
    /// the port of the gateway.
    #[arg(long, value_name = "URL")]
    gateway_url: Option<String>,
}

/// What has been created so far.
#[derive(Default)]
struct Made {
    service: Option<MadeService>,
    key: Option<NewServiceKeyView>,
    token: Option<NewEnrollmentTokenView>,
    /// What both commands begin with; empty for a public authority.
    write_authority: String,
    /// Calls the service with the key.
    curl_command: Option<String>,
    /// Runs the agent with the token.
    agent_command: Option<String>,
}

struct MadeService {
    /// As the API gives it.
    json: Value,
    view: ServiceView,
    created: bool,
}

impl Access {
    pub(crate) fn is_wanted(&self) -> bool {
        self.create_account || self.with_key || self.with_agent
    }

    /// Creates the service and what is wanted with it, and prints it. After a failure, prints what
    /// exists: secrets are shown only once.
    pub(crate) fn create(
        self,
        account: &AccountId,
        new: &NewService,
        output: &mut Output,
    ) -> Result<(), CommandError> {
        if self.with_key
            && new
                .modes
                .as_ref()
                .is_some_and(|modes| !modes.contains(&Mode::ServiceKey))
        {
            return Err(CommandError::NoKeyMode);
        }
        let mut steps = Steps {
            done: Vec::new(),
            left: self.steps(account, new),
        };
        let mut made = Made::default();
        let result = self.make(account, new, output, &mut steps, &mut made);
        if made.service.is_some() {
            made.print(self.backend_port, output)?;
        }
        result.map_err(|error| match steps.done.is_empty() {
            true => error,
            false => CommandError::Partly {
                error: Box::new(error),
                made: steps.done.join(", "),
                missing: steps.left.join(", "),
            },
        })
    }

    /// Names of what is created, in this order.
    fn steps(&self, account: &AccountId, new: &NewService) -> Vec<String> {
        let steps = [
            (self.create_account, format!("account {account}")),
            (true, format!("service {account}--{}", new.id)),
            (self.with_key, "service key".to_owned()),
            (self.with_agent, "enrollment token".to_owned()),
        ];
        steps
            .into_iter()
            .filter_map(|(wanted, step)| wanted.then_some(step))
            .collect()
    }

    fn make(
        &self,
        account: &AccountId,
        new: &NewService,
        output: &Output,
        steps: &mut Steps,
        made: &mut Made,
    ) -> Result<(), CommandError> {
        let post = |path: &str, body: &Value| output.api.request_with(Method::POST, path, body);
        if self.create_account {
            let new = NewAccount {
                id: account.to_string(),
                capture_allowed: None,
                domains_max: None,
                managed_by: None,
            };
            post("/accounts", &json!(new))?;
            steps.next_is_done();
        }
        let reply = post(&format!("/accounts/{account}/services"), &json!(new))?;
        steps.next_is_done();
        let view: ServiceView = reply.parse()?;
        let hostname = view.hostname.clone();
        let accepts_keys = view.modes.contains(&Mode::ServiceKey);
        made.service = Some(MadeService {
            json: reply.parse()?,
            view,
            created: reply.created(),
        });
        if !self.with_key && !self.with_agent {
            return Ok(());
        }
        let mut address: GatewayAddress = output.api.request(Method::GET, "/gateway")?.parse()?;
        if let Some(url) = &self.gateway_url {
            address.gateway_url.clone_from(url);
        }
        made.write_authority = address.write_authority();
        let service = vec![new.id.clone()];
        if self.with_key {
            if !accepts_keys {
                return Err(CommandError::NoKeyMode);
            }
            let new = NewCallerSecret {
                allowed_services: service.clone(),
                ..NewCallerSecret::default()
            };
            let reply = post(&format!("/accounts/{account}/service-keys"), &json!(new))?;
            made.add_key(reply.parse()?, &address, &hostname);
            steps.next_is_done();
        }
        if self.with_agent {
            let new = NewEnrollmentToken {
                services: service,
                ..NewEnrollmentToken::default()
            };
            let path = format!("/accounts/{account}/enrollment-tokens");
            let reply = post(&path, &json!(new))?;
            steps.next_is_done();
            made.add_token(reply.parse()?, &address, self.backend_port);
        }
        Ok(())
    }
}

/// Names of what is created.
struct Steps {
    done: Vec<String>,
    left: Vec<String>,
}

impl Steps {
    fn next_is_done(&mut self) {
        self.done.push(self.left.remove(0));
    }
}

impl Made {
    fn add_key(&mut self, key: NewServiceKeyView, address: &GatewayAddress, hostname: &str) {
        self.curl_command = key
            .service_key
            .as_ref()
            .map(|key| address.call_with_key(hostname, key));
        self.key = Some(key);
    }

    fn add_token(
        &mut self,
        token: NewEnrollmentTokenView,
        address: &GatewayAddress,
        backend_port: u16,
    ) {
        self.agent_command = Some(address.agent_command(&token.token, backend_port));
        self.token = Some(token);
    }

    fn print(self, backend_port: u16, output: &mut Output) -> Result<(), CommandError> {
        if output.json {
            return output.print_json(&self.into_json().to_string());
        }
        output.write(|out| self.write(backend_port, out))
    }

    /// The service as the API gives it, with further members.
    fn into_json(self) -> Value {
        let Self {
            service,
            key,
            token,
            curl_command,
            agent_command,
            ..
        } = self;
        let mut all = service.map_or(Value::Null, |service| service.json);
        let mut add = |name: &str, value: Option<Value>| {
            if let (Some(all), Some(value)) = (all.as_object_mut(), value) {
                all.insert(name.to_owned(), value);
            }
        };
        add("key_id", key.as_ref().map(|key| json!(key.key.key_id)));
        add(
            "service_key",
            key.and_then(|key| key.service_key).map(Value::from),
        );
        add(
            "enrollment_token_id",
            token.as_ref().map(|token| json!(token.enrollment_token.id)),
        );
        add("enrollment_token", token.map(|token| token.token.into()));
        add("agent_command", agent_command.map(Value::from));
        add("curl_command", curl_command.map(Value::from));
        all
    }

    fn write(&self, backend_port: u16, out: &mut impl Write) -> io::Result<()> {
        if let Some(service) = &self.service {
            writeln!(
                out,
                "{}",
                if service.created {
                    "Created:"
                } else {
                    "Already exists, unchanged:"
                }
            )?;
            write_facts(&service.view, out)?;
        }
        if let Some(key) = &self.key {
            writeln!(out, "\nService key:")?;
            write_facts(key, out)?;
        }
        // Printed once, for both commands.
        let shared = match (&self.agent_command, &self.curl_command) {
            (Some(_), Some(_)) => &*self.write_authority,
            _ => "",
        };
        let without_shared =
            |command: &str| command.strip_prefix(shared).unwrap_or(command).to_owned();
        if let (Some(token), Some(command)) = (&self.token, &self.agent_command) {
            writeln!(out, "\nEnrollment token:")?;
            write_facts(&token.enrollment_token, out)?;
            writeln!(out, "The token is shown only this once, and works once.")?;
            if !shared.is_empty() {
                writeln!(
                    out,
                    "\n\
                     First, where each of the commands below is run: the certificate to trust.\n\n\
                     {}",
                    shared.trim_end()
                )?;
            }
            writeln!(
                out,
                "\nRun beside the backend, which listens on port {backend_port}:\n\n{}",
                without_shared(command)
            )?;
        }
        if let Some(command) = &self.curl_command {
            writeln!(out, "\nCall the service:\n\n{}", without_shared(command))?;
        }
        Ok(())
    }
}
