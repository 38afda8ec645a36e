//! Domains that DNS does not prove any more.

use super::DOMAIN;
use super::setup::{Changes, Setup};
use crate::support::eventually;
use crate::support::processes::machine::Machine;

#[test]
fn a_lost_domain_is_answered_for_seven_days_and_a_disabled_one_is_refused() {
    let Some(setup) = Setup::with(Changes {
        machine: Some(Machine::new()),
        ..Changes::default()
    }) else {
        return;
    };
    setup.serve_uploaded(DOMAIN);
    let config = setup.caller(&[b"http/1.1"]);
    let mut kept = setup.connect(&config, DOMAIN).unwrap();
    assert_eq!(setup.ask(&mut kept, DOMAIN), 200);
    let delete = format!("delete {DOMAIN} CNAME");
    setup.named.update(&[&delete]);
    for clock in ["+0", "+167h"] {
        setup.set_clock(clock);
        assert_eq!(setup.check(DOMAIN)["status"], "lost", "{clock}");
        assert_eq!(setup.ask(&mut kept, DOMAIN), 200, "{clock}");
        let mut new = setup.connect(&config, DOMAIN).unwrap();
        assert_eq!(setup.ask(&mut new, DOMAIN), 200, "{clock}");
    }

    setup.set_clock("+169h");
    let checked = setup.check(DOMAIN);
    assert_eq!(checked["status"], "disabled", "{checked}");
    eventually("the open connection refuses the domain", || {
        (setup.ask(&mut kept, DOMAIN) == 421).then_some(())
    });
    eventually("no handshake has the certificate of the domain", || {
        setup.connect(&config, DOMAIN).is_none().then_some(())
    });

    setup.lead_here(DOMAIN);
    assert_eq!(setup.check(DOMAIN)["status"], "active");
    let mut again = eventually("the domain is served again", || {
        setup.connect(&config, DOMAIN)
    });
    assert_eq!(setup.ask(&mut again, DOMAIN), 200);
    setup.stop();
}
